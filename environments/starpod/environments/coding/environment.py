"""Write a Python function for a described task. It runs on hidden tests in a confined process."""

from __future__ import annotations

import random
import re
import textwrap
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
    digest,
)

from .execution import RunLimits, call_program, prepare_runs, same_value
from .picture import draw
from .tasks import CodingTask, draw_task, expected

MAX_LENGTH = 20_000
"""Maximum number of characters of a program."""
SHOWN_TESTS = 2
"""Number of tests, counted from the first, whose arguments and results the agent sees."""

_OPENING = re.compile(r"(^[ \t]*)?(?<!`)(`{3,})(?!`)[^\S\n]*(?:([\w+-]+)[^\S\n]*)?\n", re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py")
_CODE = re.compile(r"""#[^\n]*|\"{3}|'{3}|"(?:[^"\\\n]|\\[\s\S])*"?|'(?:[^'\\\n]|\\[\s\S])*'?|`{3,}""")
"""Tokens to recognize in the search for the end of a program: comments, triple quotes, strings and backtick fences."""
_TRIPLE_QUOTED_ENDS = {quotes: re.compile(rf"(?:[^\\]|\\.)*?{quotes}", re.DOTALL) for quotes in ('"""', "'''")}


class CodingOptions(EnvironmentOptions):
    """Options for the number of attempts, the tests, and the limits of programs."""

    attempts: int = Field(default=3, ge=1, le=20, description="Maximum number of programs.")
    tests: int = Field(default=8, ge=2, le=24, description="Number of tests; the first two are shown.")
    reward: Literal["all", "share"] = Field(
        default="all",
        description="Reward of a program. all: 1 if all tests pass; share: the increase of the best share of passed "
        "tests.",
    )
    max_instructions: int = Field(
        default=1_000_000,
        ge=10_000,
        le=20_000_000,
        description="Maximum number of Python instructions, for all tests together.",
    )
    max_seconds: int = Field(
        default=4, ge=1, le=30, description="Maximum CPU seconds; they matter if single instructions take long."
    )
    max_megabytes: int = Field(default=256, ge=32, le=2048, description="Maximum memory of a program in MiB.")

    @model_validator(mode="after")
    def _counting_comes_first(self) -> CodingOptions:
        if (min_seconds := self.max_instructions // 1_000_000) > self.max_seconds:
            raise ValueError(
                f"this number of instructions may take {min_seconds} seconds; raise max_seconds to at least that"
            )
        return self


class Coding(Environment):
    """Programming tasks. The seed determines the task and its tests, and equal programs have equal results.

    The number of Python instructions is limited, because such a limit is deterministic. The time limit only ends
    programs in which single instructions take long. Clock, process id and random numbers are the same in every process.
    Memory addresses (`id`, the default `repr`) and facts about the machine still differ between processes.
    """

    spec = EnvironmentSpec(
        id="coding-v1",
        version="1.1.1",
        title="Coding: write a function that passes hidden tests",
        instructions=(
            "Write a Python function as described. Answer with the whole program, plain or in a block of ```python. It "
            "is tested on hidden arguments. The reply says how many tests passed, and you may try again a few times. "
            "The standard library's modules for computing can be imported; files, network and processes cannot be used."
        ),
        grammar=f"a Python program of at most {MAX_LENGTH} characters, plain or in a block of ```python",
        render_modes=("text", "png"),
        limits=Limits(max_turns=20, max_actions_per_turn=1, max_actions=20),
        concurrency=Concurrency.THREAD,
    )
    Options = CodingOptions
    options: CodingOptions

    drawn: int
    """Seed of the task."""
    tries: int
    program: str
    """The latest program, cut to the part that pictures show."""
    passed: list[bool]
    best: float
    told: str
    _cached_task: CodingTask | None = None

    @classmethod
    def prepare(cls) -> None:
        prepare_runs()

    def reset(self, rng: random.Random) -> None:
        self.drawn = rng.getrandbits(63)
        self._cached_task = None
        self.tries = 0
        self.program = ""
        self.passed = []
        self.best = 0.0
        self.told = self._describe()

    @property
    def task(self) -> CodingTask:
        """The task. It is not part of the state, so it is drawn again after a restore or fork."""
        if self._cached_task is None:
            self._cached_task = draw_task(random.Random(self.drawn), self.options.tests)
        return self._cached_task

    def _describe(self) -> str:
        task = self.task
        tests = zip(task.arguments[:SHOWN_TESTS], expected(task), strict=False)
        examples = [f"{_call(task, arguments)} == {result!r}" for arguments, result in tests]
        return "\n".join([task.text, "", task.signature, "", "Examples:", *examples])

    def step(self, action: Any) -> Outcome:
        if not isinstance(action, str) or len(action) > MAX_LENGTH:
            return INVALID
        program = read_program(action)
        self.tries += 1
        self.program = program[:2_000]
        task, options = self.task, self.options
        limits = RunLimits(options.max_instructions, options.max_seconds, options.max_megabytes)
        problem, results = call_program(program, task.function, task.arguments, limits)
        truths = expected(task)
        self.passed = [
            not error and same_value(value, truth) for (error, value), truth in zip(results, truths, strict=True)
        ]
        # A program that lists the shown results passes their tests: they count together with a hidden one.
        counts = any(self.passed[SHOWN_TESTS:]) or len(self.passed) <= SHOWN_TESTS
        share = sum(self.passed) / len(self.passed) if counts else 0.0
        gain, self.best = max(0.0, share - self.best), max(self.best, share)
        is_solved = share == 1
        self.told = f"The program does not work: {problem}." if problem else self._report(results, truths)
        is_over = is_solved or self.tries >= options.attempts
        return Outcome(
            gain if options.reward == "share" else float(is_solved),
            terminated=is_over,
            success=is_solved if is_over else None,
            valid=not problem,
            criteria={f"test_{number}": right and counts for number, right in enumerate(self.passed, 1)},
        )

    def _report(self, results: list[tuple[Any, Any]], truths: list[Any]) -> str:
        task = self.task
        lines = [f"{sum(self.passed)} of {len(self.passed)} tests passed."]
        for number, (error, value) in enumerate(results[:SHOWN_TESTS]):
            if not self.passed[number]:
                result = str(error)[:200] if error else repr(value)[:200]
                lines.append(f"{_call(task, task.arguments[number])} gave {result}, expected {truths[number]!r}")
        return "\n".join(lines)

    def observe(self) -> str:
        return self.told

    def state_key(self) -> bytes:
        return digest(repr((self.drawn, self.tries, self.best, self.told)))

    def expert_action(self) -> str | None:
        is_over = self.best == 1 or self.tries >= self.options.attempts
        return None if is_over else self.task.program

    def score(self) -> float:
        """Return the share of tests that the best program passed."""
        return self.best

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return draw(self.task.text, self.program, self.passed, self.told if self.tries else "")
        return "\n".join([self._describe(), *([self.program, self.told] if self.tries else [])])


def read_program(action: str) -> str:
    """Return the program in an answer: the last block of ```python, else the last block without a language, else all.

    Closed blocks are preferred to an unclosed one, which extends to the end of the answer.
    """
    text = action.replace("\r\n", "\n")
    blocks: dict[tuple[bool, bool], str] = {}
    endless_fences: set[str] = set()
    position = 0
    while opening := _OPENING.search(text, position):
        position, language = opening.end(), (opening[3] or "").lower()
        if not language and opening[1] is None:
            continue  # a fence after other text on its line closes a block
        if language in _LANGUAGES:
            end, is_closed = _program_end(text, position, opening[2], endless_fences)
        else:
            end = text.find(opening[2], position)
            end, is_closed = (end, True) if end >= 0 else (len(text), False)
        if language in _LANGUAGES:
            body = text[position:end]
            blocks[bool(language), is_closed] = textwrap.dedent(body) if opening[1] else body
        position = end + len(opening[2]) if is_closed else len(text)
    order = ((True, True), (True, False), (False, True), (False, False))
    return next((blocks[kind] for kind in order if kind in blocks), action)


def _program_end(text: str, start: int, fence: str, endless: set[str]) -> tuple[int, bool]:
    """Return the end of a block's program, and whether a fence closes the block.

    Python has backticks only in strings and comments, so the first fence outside of them closes the block.

    Args:
        endless: kinds of triple quotes that were found to have no closing quotes. They are not searched for again, so
            that the time is linear.
    """
    position = start
    while token := _CODE.search(text, position):
        position = token.end()
        if token[0].startswith(fence):
            return token.start(), True
        if token[0] in _TRIPLE_QUOTED_ENDS:
            ending = None if token[0] in endless else _TRIPLE_QUOTED_ENDS[token[0]].match(text, position)
            if ending is None:
                endless.add(token[0])
                break  # not a valid program
            position = ending.end()
    end = text.find(fence, start)
    return (end, True) if end >= 0 else (len(text), False)


def _call(task: CodingTask, arguments: list[Any]) -> str:
    return f"{task.function}({', '.join(map(repr, arguments))})"
