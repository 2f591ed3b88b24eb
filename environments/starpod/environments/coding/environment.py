"""Write a Python function for a described task. It runs in a confined process, on tests that it cannot see."""

from __future__ import annotations

import json
import random
import re
import textwrap
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from starpod.env_server import (
    INVALID,
    Concurrency,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Limits,
    Outcome,
    Unavailable,
    digest,
    read_untrusted_json,
    run_confined,
)

from .picture import draw
from .tasks import Task, draw_task, expected

MAX_LENGTH = 20_000
"""Characters of a program."""
SHOWN_TESTS = 2
"""Tests whose arguments and results are told, the first ones."""

_OPENING = re.compile(r"(^[ \t]*)?(?<!`)(`{3,})(?!`)[^\S\n]*(?:([\w+-]+)[^\S\n]*)?\n", re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py")
_CODE = re.compile(r"""#[^\n]*|\"{3}|'{3}|"(?:[^"\\\n]|\\[\s\S])*"?|'(?:[^'\\\n]|\\[\s\S])*'?|`{3,}""")
"""What decides where a program ends: comments, beginnings of long texts, texts, fences."""
_LONG_TEXT_ENDS = {quotes: re.compile(rf"(?:[^\\]|\\.)*?{quotes}", re.DOTALL) for quotes in ('"""', "'''")}
_RUNNER = str(Path(__file__).with_name("runner.py"))
_LIMITS = {
    "instructions": "it ran too many instructions",
    "uncounted": "it disturbed the count of its instructions, by sys.settrace or a recursion that is too deep",
    "memory": "it took too much memory",
    "time": "it took too long",
    "died": "it ended the process that it ran in",
}


class CodingOptions(EnvironmentOptions):
    """How often one may try, what is tested and what a program may use."""

    attempts: int = Field(default=3, ge=1, le=20, description="Programs that may be handed in.")
    tests: int = Field(default=8, ge=2, le=24, description="Tests; the first two are shown.")
    reward: Literal["all", "share"] = Field(
        default="all",
        description="What a program pays: 1 if all tests pass; or the share by which it is the best so far.",
    )
    max_instructions: int = Field(
        default=1_000_000,
        ge=10_000,
        le=20_000_000,
        description="Instructions of Python that all tests may run together.",
    )
    max_seconds: int = Field(
        default=4, ge=1, le=30, description="Seconds of computing, for what runs long within one instruction."
    )
    max_megabytes: int = Field(default=256, ge=32, le=2048, description="Memory of a program.")

    @model_validator(mode="after")
    def _counting_comes_first(self) -> CodingOptions:
        if (least := self.max_instructions // 1_000_000) > self.max_seconds:
            raise ValueError(f"so many instructions may take {least} seconds; raise max_seconds to that at least")
        return self


class Coding(Environment):
    """The seed fixes the task and its tests. Programs of the same text have the same results.

    Instructions are counted, which is the same everywhere; the clock ends only what runs long within one of them. A
    program sees the same time, process id and random numbers in every process. It could still tell processes apart by
    addresses in memory (`id`, the texts of plain objects) and facts about the machine.
    """

    spec = EnvironmentSpec(
        id="coding-v1",
        version="1.0.2",
        title="Coding: write a function that passes hidden tests",
        instructions=(
            "Write a Python function as described. Answer with the whole program, plain or in a block of ```python. It "
            "is tested on hidden arguments; you are told how many tests passed, and may try again a few times. The "
            "standard library's modules for computing can be imported; files, network and processes cannot be used."
        ),
        grammar=f"a Python program of at most {MAX_LENGTH} characters, plain or in a block of ```python",
        render_modes=("text", "png"),
        limits=Limits(max_turns=20, max_actions_per_turn=1, max_actions=20),
        concurrency=Concurrency.THREAD,
    )
    Options = CodingOptions
    options: CodingOptions

    drawn: int
    """What the task is drawn from."""
    tries: int
    program: str
    """The latest one, cut to what a picture shows."""
    passed: list[bool]
    best: float
    told: str
    _cached_task: Task | None = None

    @classmethod
    def prepare(cls) -> None:
        try:
            run_confined(_RUNNER, json.dumps({"code": "", "function": "", "arguments": [], "instructions": 9}).encode())
        except (RuntimeError, OSError) as error:
            raise Unavailable(f"{error}; it needs Linux with Landlock or mounts, and seccomp") from error

    def reset(self, rng: random.Random) -> None:
        self.drawn = rng.getrandbits(63)
        self._cached_task = None
        self.tries = 0
        self.program = ""
        self.passed = []
        self.best = 0.0
        self.told = self._describe()

    @property
    def task(self) -> Task:
        """The task, drawn again after a restore or fork."""
        if self._cached_task is None:
            self._cached_task = draw_task(random.Random(self.drawn), self.options.tests)
        return self._cached_task

    def _describe(self) -> str:
        task = self.task
        shown = zip(task.arguments[:SHOWN_TESTS], expected(task), strict=False)
        examples = [f"{_call(task, arguments)} == {result!r}" for arguments, result in shown]
        return "\n".join([task.text, "", task.signature, "", "Examples:", *examples])

    def step(self, action: Any) -> Outcome:
        if not isinstance(action, str) or len(action) > MAX_LENGTH:
            return INVALID
        program = read_program(action)
        self.tries += 1
        self.program = program[:2_000]
        problem, results = self._run(program)
        task = self.task
        truths = expected(task)
        self.passed = [not error and _same(value, truth) for (error, value), truth in zip(results, truths, strict=True)]
        share = sum(self.passed) / len(self.passed)
        gain, self.best = max(0.0, share - self.best), max(self.best, share)
        solved = share == 1
        self.told = f"The program does not work: {problem}." if problem else self._report(results, truths)
        over = solved or self.tries >= self.options.attempts
        return Outcome(
            gain if self.options.reward == "share" else float(solved),
            terminated=over,
            success=solved if over else None,
            valid=not problem,
            criteria={f"test_{number}": right for number, right in enumerate(self.passed, 1)},
        )

    def _run(self, program: str) -> tuple[str, list[tuple[Any, Any]]]:
        """What went wrong with the program as a whole, and an error or a value for each test.

        The process is not believed: what it says is values at most, and the right ones are not known to it.
        """
        task, options = self.task, self.options
        work = {
            "code": program,
            "function": task.function,
            "arguments": task.arguments,
            "instructions": options.max_instructions,
        }
        failed: list[tuple[Any, Any]] = [("failed", None)] * len(task.arguments)
        reply, ended = run_confined(
            _RUNNER,
            json.dumps(work).encode(),
            cpu_seconds=options.max_seconds,
            memory_bytes=options.max_megabytes * 2**20,
        )
        if ended == "time":
            return _LIMITS["time"], failed
        try:
            said = read_untrusted_json(reply)
            if "limit" in said:
                return _LIMITS[said["limit"]], failed
            if "error" in said:
                return str(said["error"])[:200], failed
            results = [(result.get("error"), result.get("value")) for result in said["results"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            return _LIMITS["died"], failed
        return ("", results) if len(results) == len(failed) else (_LIMITS["died"], failed)

    def _report(self, results: list[tuple[Any, Any]], truths: list[Any]) -> str:
        task = self.task
        lines = [f"{sum(self.passed)} of {len(self.passed)} tests passed."]
        for number, (error, value) in enumerate(results[:SHOWN_TESTS]):
            if not self.passed[number]:
                got = str(error)[:200] if error else repr(value)[:200]
                lines.append(f"{_call(task, task.arguments[number])} gave {got}, expected {truths[number]!r}")
        return "\n".join(lines)

    def observe(self) -> str:
        return self.told

    def state_key(self) -> bytes:
        return digest(repr((self.drawn, self.tries, self.best, self.told)))

    def expert_action(self) -> str | None:
        over = self.best == 1 or self.tries >= self.options.attempts
        return None if over else self.task.program

    def score(self) -> float:
        """The share of the tests that the best program passed."""
        return self.best

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return draw(self.task.text, self.program, self.passed, self.told if self.tries else "")
        return "\n".join([self._describe(), *([self.program, self.told] if self.tries else [])])


def read_program(action: str) -> str:
    """Return the program of an answer: its last block of ```python, else its last block without a language, else all.

    Complete blocks go before one that is not closed, which ends with the answer.
    """
    text = action.replace("\r\n", "\n")
    blocks: dict[tuple[bool, bool], str] = {}
    endless: set[str] = set()
    at = 0
    while opening := _OPENING.search(text, at):
        at, language = opening.end(), (opening[3] or "").lower()
        if not language and opening[1] is None:
            continue  # a fence behind a text closes something
        if language in _LANGUAGES:
            end, closed = _program_end(text, at, opening[2], endless)
        else:
            end = text.find(opening[2], at)
            end, closed = (end, True) if end >= 0 else (len(text), False)
        if language in _LANGUAGES:
            inside = text[at:end]
            blocks[bool(language), closed] = textwrap.dedent(inside) if opening[1] else inside
        at = end + len(opening[2]) if closed else len(text)
    order = ((True, True), (True, False), (False, True), (False, False))
    return next((blocks[kind] for kind in order if kind in blocks), action)


def _program_end(text: str, start: int, fence: str, endless: set[str]) -> tuple[int, bool]:
    """Return where the program of a block ends, and whether a fence closes it.

    Python has no backticks outside of texts and comments, so that the first fence outside of them closes the block.

    Args:
        text: The answer.
        start: Where the block's inside begins.
        fence: The backticks that opened the block.
        endless: Quotes of long texts that were found not to end, which are not searched for again: time stays linear.
    """
    at = start
    while found := _CODE.search(text, at):
        at = found.end()
        if found[0].startswith(fence):
            return found.start(), True
        if found[0] in _LONG_TEXT_ENDS:
            ending = None if found[0] in endless else _LONG_TEXT_ENDS[found[0]].match(text, at)
            if ending is None:
                endless.add(found[0])
                break  # no program: its text never ends
            at = ending.end()
    end = text.find(fence, start)
    return (end, True) if end >= 0 else (len(text), False)


def _call(task: Task, arguments: list[Any]) -> str:
    return f"{task.function}({', '.join(map(repr, arguments))})"


def _same(value: Any, truth: Any) -> bool:
    """Whether both are equal and of the same types: True is not 1."""
    if isinstance(truth, list):
        return (
            isinstance(value, list)
            and len(value) == len(truth)
            and all(_same(one, other) for one, other in zip(value, truth, strict=True))
        )
    return type(value) is type(truth) and bool(value == truth)
