"""coding-v1: tasks and their truths, attempts, and programs that attack: what they do is an outcome."""

import functools
import json
import os
import random
import textwrap

import pytest

from starpod.env_server.episodes.live_episode import LiveEpisode, TurnResult, Want
from starpod.environments.coding import Coding
from starpod.environments.coding.environment import read_program
from starpod.environments.coding.tasks import _FAMILIES, draw_task, expected
from tests.environments import episodes

start = functools.partial(episodes.start, Coding)


def turn(episode: LiveEpisode, program: str) -> TurnResult:
    return episode.turn([program], Want(state_key=True))


def test_every_kind_of_task_comes_with_a_program_and_telling_tests() -> None:
    tasks = [draw_task(random.Random(seed), 8) for seed in range(300)]
    assert {task.function for task in tasks} == {family.function for family in _FAMILIES}
    for task in tasks:
        results = expected(task)
        assert len(results) == 8 and task.signature in task.program
        assert json.loads(json.dumps(results)) == results, "JSON carries it as it is"
        shown = [json.dumps(result) for result in results]
        assert max(map(shown.count, shown)) <= 6, (task, "a constant passes too many tests")
        assert "{" not in task.text + task.signature


@pytest.mark.parametrize("name", [family.function for family in _FAMILIES])
def test_the_program_of_the_expert_passes(name: str) -> None:
    seed = next(seed for seed in range(999) if start(seed).environment.task.function == name)
    episode = start(seed)
    transition = turn(episode, f"Here it is:\n```python\n{episode.environment.expert_action()}```\nDone.")
    assert (transition.reward, transition.success, episode.environment.score()) == (1, True, 1)
    assert transition.parts == "8 of 8 tests passed."
    assert episode.environment.expert_action() is None


ATTACKS = {
    "while True: pass": "too many instructions",
    "def f():\n try:\n  while True: pass\n except BaseException: f()\nf()": "too many instructions",
    "import sys\nsys.settrace(None)\nwhile True: pass": "disturbed the count",
    "import sys\nsys._getframe().f_trace = None\nwhile True: pass": "sys._getframe is out of a program's reach",
    "import threading\nthreading.settrace(None)\nwhile True: pass": "too many instructions",
    "import threading\nthreading.Thread(target=print).start()": "out of a program's reach",
    "sum(range(10**12))": "too long",
    "x = [0] * 10**10": "too much memory",
    "x = 'a' * 10**9": "too much memory",
    "import os\nos._exit(0)": "ended the process",
    "import signal\nsignal.raise_signal(signal.SIGKILL)": "ended the process",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": "PermissionError|ProcessLookupError",
    "raise SystemExit": "SystemExit",
    "def f(:": "SyntaxError",
    "x = open('/etc/passwd').read()": "FileNotFoundError|PermissionError",
    "import starpod.environments.coding.tasks": "ModuleNotFoundError|FileNotFoundError|PermissionError|NotADirectory",
    "import os\nos.listdir('/')": "PermissionError|FileNotFoundError",
    "import socket\nsocket.socket().connect(('127.0.0.1', 1))": "PermissionError",
    "import os\nos.fork()": "PermissionError",
    "import subprocess\nsubprocess.run(['true'])": "PermissionError",
}


@pytest.mark.parametrize("program", ATTACKS)
def test_an_attack_is_a_failed_attempt_and_the_session_continues(program: str) -> None:
    episode = start(3, attempts=2, max_seconds=1)
    transition = turn(episode, program)
    assert isinstance(transition.parts, str)
    said = ATTACKS[program].split("|")
    assert any(each in transition.parts for each in said), transition.parts
    assert transition.parts.startswith("The program does not work: ")
    assert (transition.reward, transition.success, transition.end_reason) == (0, None, 0)
    assert transition.outcomes[0] is not None and not transition.outcomes[0].valid
    assert episode.environment.tries == 1
    if "_exit" in program or "SIGKILL" in program or "**12" in program:
        assert turn(episode, episode.environment.expert_action()).success


UNCOUNTED = {
    "settrace": "try: sys.settrace(None)\nexcept ValueError: pass",
    "a fresh sys": "del sys.modules['sys']\ntry: __import__('sys').settrace(None)\nexcept ValueError: pass",
    "its own frame": "sys._getframe().f_trace = None",
    "fewer events": "sys._getframe().f_trace_opcodes = False",
    "the frame of an error": "try: 1 / 0\nexcept ZeroDivisionError as e: e.__traceback__.tb_frame.f_trace = None",
    "the trace function": "sys.gettrace().__kwdefaults__['take'] = len",
    "a thread": "thread = threading.Thread(target=spin)\nthread.start()\nthread.join()\nreturn right(*a)",
    "the module below": "import _thread, time\n_thread.start_new_thread(spin, ())\n"
    "while not spun: time.sleep(0.01)\nreturn right(*a)",
    "threading.settrace": "threading.settrace(None)",
    "a profiler": "sys.setprofile(spin)\nlen('')\nsys.setprofile(None)\nreturn right(*a)",
    "ctypes": "sys.modules['ctypes'].pythonapi.PyEval_SetTrace(None, None)",
    "a recursion that is too deep": "try: deeper()\nexcept RecursionError: pass",
    "a low recursion limit": "for n in range(5, 900):\n    try: sys.setrecursionlimit(n); break\n"
    "    except RecursionError: pass\ntry: len([1 + 1])\nexcept RecursionError: pass\nsys.setrecursionlimit(1000)",
    "what ends the process": "import os\nos._exit = print",
    "what writes the results": "import json\ndumps = json.dumps\n"
    "json.dumps = lambda results: [spin(), dumps(results)][1]\nreturn right(*a)",
    "the text of an error": "class Slow(Exception):\n    def __str__(self): return spin()\nraise Slow",
}


@pytest.mark.parametrize("trick", UNCOUNTED)
def test_the_count_of_instructions_cannot_be_switched_off(trick: str) -> None:
    """Each program would give the right results after a million rounds."""
    task = start(3).environment.task
    program = (
        f"import sys, threading\n{task.program}\nright = {task.function}\ndef deeper(): deeper()\n"
        "spun = []\ndef spin(*_):\n    for _ in range(1_000_000): pass\n    spun.append(1)\n    return 'done'\n"
        f"def {task.function}(*a):\n{textwrap.indent(UNCOUNTED[trick], '    ')}\n"
        "    for _ in range(1_000_000): pass\n    return right(*a)"
    )
    transition = start(3).turn([program], Want())
    assert sum(transition.details.criteria.values()) == 0, transition.parts  # type: ignore[union-attr]
    assert "done" not in str(transition.parts)


@pytest.mark.parametrize(
    "used",
    [
        "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\nassert Pair(1, 2).b == 2",
        "import typing\nclass Pair(typing.NamedTuple):\n    a: int = 1\nassert Pair().a == 1",
        "import enum\nassert len(enum.Enum('Colour', 'red green')) == 2",
        "import sys\nsys.setrecursionlimit(10_000)\ndef deep(n): return n and deep(n - 1)\nassert deep(2_000) == 0",
        "def deeper(): deeper()\ntry: deeper()\nexcept RecursionError: pass",
    ],
)
def test_what_programs_use_is_not_refused(used: str) -> None:
    episode = start(3)
    assert turn(episode, f"{used}\n{episode.environment.task.program}").success


def test_what_a_process_claims_is_not_believed() -> None:
    """The harness is in the program's reach; the right results are not."""
    task = start(3).environment.task
    other = next(seed for seed in range(999) if start(seed).environment.task.function == "balanced")
    program = f"{start(other).environment.task.program}\nright = balanced\n"
    claims = [
        (
            3,
            "import os, json\ndata = json.dumps({'results': [{'value': True}] * 8}).encode()\n"
            "for fd in range(3, 16):\n    try: os.write(fd, data)\n    except OSError: pass\nos._exit(0)",
        ),
        (3, f"class Any:\n    def __eq__(self, other): return True\ndef {task.function}(*a): return Any()"),
        (3, f"def {task.function}(*a): return 'passed'"),
        # A result of another type is another result.
        *(
            (other, f"{program}def balanced(*a): return {kind}(right(*a))")
            for kind in ("int", "str", "(lambda x: [x])")
        ),
    ]
    for seed, claim in claims:
        assert sum(start(seed).turn([claim], Want()).details.criteria.values()) == 0  # type: ignore[union-attr]


def test_feedback_contains_only_the_examples_and_attempts_end() -> None:
    episode = start(3, attempts=2)
    environment = episode.environment
    task = environment.task
    wrong = f"def {task.function}(*arguments): return 'nothing'"
    first = turn(episode, wrong)
    assert isinstance(first.parts, str)
    assert first.parts.startswith("0 of 8 tests passed.") and first.parts.count("\n") == 2
    assert all(repr(arguments)[1:-1] not in first.parts for arguments in task.arguments[2:])
    last = turn(episode, wrong)
    assert (last.terminated, last.success, environment.expert_action()) == (True, False, None)


def test_a_program_that_lists_the_shown_results_earns_nothing() -> None:
    for seed in range(8):
        episode = start(seed, reward="share")
        task = episode.environment.task
        shown = dict(zip(map(repr, task.arguments[:2]), expected(task), strict=False))
        transition = turn(
            episode, f"def {task.function}(*a): return {shown!r}.get(repr(a), {shown!r}.get(repr(list(a)), 'no'))"
        )
        assert "2 of 8 tests passed." in str(transition.parts)
        assert transition.reward == 0 and not any(transition.details.criteria.values())
        assert episode.environment.score() == 0


def test_share_pays_for_the_best_so_far() -> None:
    episode = start(3, reward="share", attempts=4)
    task = episode.environment.task
    half = f"{task.program}\nright, calls = {task.function}, []\ndef {task.function}(*a):\n    calls.append(1)\n"
    half += "    return right(*a) if len(calls) <= 4 else 'no'"
    assert [turn(episode, program).reward for program in (half, "pass", half, task.program)] == [0.5, 0, 0, 0.5]


def test_texts_have_the_same_hash_in_every_process() -> None:
    program = "raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({str(turn(start(3), program).parts) for _ in range(2)}) == 1


@pytest.mark.parametrize(
    "looked_at",
    [
        "time.time(), time.monotonic_ns(), time.perf_counter(), time.process_time(), time.clock_gettime(0)",
        "time.ctime(), time.asctime(), time.strftime('%H:%M:%S'), time.localtime(), time.gmtime()",
        "datetime.datetime.now(), datetime.datetime.utcnow(), datetime.date.today()",
        "os.getpid(), os.getppid(), posix.getpid(), os.times(), threading.get_native_id()",
        "os.urandom(4), os.getrandom(4), random.random(), random.Random().random(), random.SystemRandom().random()",
    ],
)
def test_a_program_looks_at_the_same_world_in_every_process(looked_at: str) -> None:
    program = f"import datetime, os, posix, random, threading, time\nraise ValueError(({looked_at}))"
    first, second = (str(turn(start(3), program).parts) for _ in range(2))
    assert first == second and "ValueError" in first
    assert str(os.getpid()) not in first


@pytest.mark.parametrize("module", ["uuid", "secrets", "_random", "_datetime", "resource", "multiprocessing.process"])
def test_a_module_that_differs_from_process_to_process_cannot_be_imported(module: str) -> None:
    assert "ModuleNotFoundError" in str(turn(start(3), f"import {module}").parts)


def test_time_passes_for_a_program() -> None:
    """A program that waits for a clock would otherwise wait until all its instructions are used up."""
    waiting = "import time\nstarted = time.time()\nwhile time.time() < started + 0.5: time.sleep(0.1)\n"
    task = start(3).environment.task
    assert turn(start(3), waiting + task.program).success


HALF = "'\\ud800'"
"""Half of a surrogate pair in a program, which no message can hold."""


@pytest.mark.parametrize(
    "program",
    [
        f"raise ValueError({HALF})",
        f"raise type('\\udfff', (Exception,), {{}})({HALF} * 300)",
        f"def FUNCTION(*_): raise KeyError({HALF})",
        f"class Told(Exception):\n    def __str__(self): return {HALF}\ndef FUNCTION(*_): raise Told",
        f"def FUNCTION(*_): return {HALF}",
        f"def FUNCTION(*_): return [[{HALF}]]",
    ],
)
def test_half_a_surrogate_pair_is_a_failed_attempt_and_its_observation_can_be_sent(program: str) -> None:
    episode = start(3, attempts=2)
    told = turn(episode, program.replace("FUNCTION", episode.environment.task.function)).parts
    assert isinstance(told, str)
    told.encode()
    assert turn(episode, episode.environment.expert_action()).success


def test_forks_and_snapshots_continue_equally() -> None:
    original = start(5)
    turn(original, "pass")
    twin, restored = original.fork(None), LiveEpisode.load(Coding, original.save())
    program = original.environment.expert_action()
    assert turn(original, program) == turn(twin, program) == turn(restored, program)
    assert len(original.save()) < 4096


P = "def f(x):\n    return x\n"
DOCSTRING = 'def f(x):\n    """As in ```f(1)```.\n\n    ```\n    f(1)\n    ```\n    """\n    return x\n'


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("a = 1", "a = 1"),
        ("```python\na = 1\n```\nor\n```py\nb = 2\n```", "b = 2\n"),
        (f"```python\n{DOCSTRING}```", DOCSTRING),
        (f"```\n{DOCSTRING}```\n", DOCSTRING),
        (f"```python\ns = '```'\n{P}```", f"s = '```'\n{P}"),
        (f"```python\n# don't write ```\n{P}```", f"# don't write ```\n{P}"),
        (f"```python\ns = 'it\\'s ```'\n{P}```", f"s = 'it\\'s ```'\n{P}"),
        ("```python\r\ndef f(x):\r\n    return x\r\n```", P),
        (f"Here:\n```python\n{P}", P),
        (f"```python\n{P}```\nbetter:\n```python\ndef f(", P),
        ("```python\na = 1```", "a = 1"),
        ("```python\na = 1``` That is it.", "a = 1"),
        (f"Answer: ```python\n{P}```", P),
        (f"```Python3\n{P}```", P),
        (f"``` python \n{P}```", P),
        (f"````python\n{DOCSTRING}````", DOCSTRING),
        (f"```python\n{P}```\nIt prints:\n```\n1\n```", P),
        (f"```python\n{P}```\n```text\n1\n```", P),
        (f"```text\nit's 1\n```\n```\n{P}```", P),
        ("- so:\n  ```python\n  def f(x):\n      return x\n  ```", P),
        (f"Use ```f```\n```python\n{P}```", P),
        ('```python\ns = """never ends\n```\nmore', 's = """never ends\n'),
    ],
)
def test_the_last_whole_block_is_the_program(answer: str, program: str) -> None:
    assert read_program(answer) == program


@pytest.mark.parametrize(
    "answer",
    ["`" * 200_000, "```" + " " * 200_000, '```py\n"' + '\\"' * 99_000, '```py\n\\"""\n```\n' * 13_000],
    ids=["fences", "blanks", "escapes", "endless"],
)
def test_an_answer_is_read_in_linear_time(answer: str) -> None:
    """A pattern that tries each length of a fence at each place takes hours for the first."""
    assert read_program(answer) is not None
