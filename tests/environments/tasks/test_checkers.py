"""Checkers of answers: what each accepts and refuses, and how a row names it."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server import Unavailable
from starpod.environments.tasks.answers import find_answer
from starpod.environments.tasks.checkers.numbers import read_number
from starpod.environments.tasks.checkers.registry import read_checker

FOLDER = Path()
ADD = {"kind": "tests", "tests": ["add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]}
CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}}


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("31", "31"),
        (" so \\boxed{1}, no \\boxed{\\frac{1}{2}} ok", "\\frac{1}{2}"),
        ("<answer>a</answer> <answer> b </answer> Answer: c", "b"),
        ("<answer>6 * 7 = 42\nAnswer: 42</answer>", "42"),
        ("36 - 5 = 31\n#### 31", "31"),
        ("Answer: 3\n**Final answer:** 4\nbye", "4"),
        ("The answer: x", "x"),
        ("**Answer:**\n\n**4**\nbye", "4"),
        ("Answer:", ""),
        ("\\boxed{never closed", "\\boxed{never closed"),
        ("</answer> <answer>", "</answer> <answer>"),
        ("", ""),
    ],
)
def test_the_answer_in_a_reply(reply: str, answer: str) -> None:
    assert find_answer(reply) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1,234.50", 1234.5), ("-3", -3), ("\u22123", -3), ("$12", 12), ("40%", 0.4), ("3/4", 0.75), ("2e-5", 2e-5)),
        *((".5", 0.5), ("**7.**", 7), ("$5$", 5), ("\\$5", 5)),
        *((text, None) for text in ("", "one", "1 2", "1/0", "1,23", "5 apples", "1e9999", "--1", "nan", "1" * 41)),
    ],
)
def test_numbers(text: str, number: float | None) -> None:
    value = read_number(text)
    assert value is None if number is None else value is not None and float(value) == number


@given(st.text(alphabet="0123456789,.-+/e%$ ") | st.text())
def test_any_text_is_a_number_or_not(text: str) -> None:
    read_number(text)


CHECKS = [
    ("exact", "New  York", ["“x”", " new york. ", "York"], [False, True, False]),
    ("number", "31", ["31.00", "$31", "31.1", "many"], [True, True, False, False]),
    ({"kind": "number", "tolerance": 0.5}, "31", ["31.5", "31.6"], [True, False]),
    (
        {"kind": "choice", "choices": ["Paris", "Rome"]},
        "B",
        ["b", "(B)", "B. Rome", "rome", "A", "C", "B. Paris"],
        [True] * 4 + [False] * 3,
    ),
    (
        {"kind": "choice", "choices": ["Go", "go", "go."]},
        "B",
        ["b", "go", "Go", "A", "GO", ""],
        [True] * 2 + [False] * 4,
    ),
    ({"kind": "choice", "choices": [".", "x"]}, ".", ["A", ".", "", "B"], [True, True, False, False]),
    ({"kind": "regex", "pattern": "[a-c]+[0-9]"}, "abc1", ["c2", "c", "c22"], [True, False, False]),
    ('{"kind": "regex", "pattern": "(a+)+b"}', "ab", ["a" * 50_000 + "b", "a" * 50_000], [True, False]),
    (
        {"kind": "schema", "schema": CITY},
        '{"city": "Rome"}',
        ['```json\n{"city": "Oslo"}\n```', '{"city": "oslo"}', "[", "1"],
        [True] + [False] * 3,
    ),
]


@pytest.mark.parametrize(("reward", "right", "answers", "accepted"), CHECKS)
def test_answers_that_a_checker_accepts(reward: object, right: str, answers: list[str], accepted: list[bool]) -> None:
    checker = read_checker(reward, FOLDER)
    checker.expect([right])
    assert [checker.check(answer, [right], {}).score == 1 for answer in answers] == accepted


@pytest.mark.skipif(sys.platform != "linux", reason="confined processes need Linux")
def test_programs_are_tested() -> None:
    checker = read_checker(ADD, FOLDER)
    checker.expect([])
    assert checker.check("```python\ndef add(a, b): return a + b\n```", [], {}) == (1, "2 of 2 tests passed.")
    half = checker.check("def add(a, b): return 3", [], {})
    assert half == (0, "1 of 2 tests passed. assert add([1], [2]) == [1, 2]: it gave 3")
    cheat = "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()"
    assert checker.check(cheat, [], {}).score == 0
    assert "SyntaxError" in checker.check("def", [], {}).told
    mean = read_checker({"kind": "tests", "tests": ["mean([1, 3]) == 2", "mean([1, 2]) == 1.5"]}, FOLDER)
    assert mean.check("def mean(numbers): return sum(numbers) / len(numbers)", [], {}).score == 1
    ones = read_checker({"kind": "tests", "tests": ["one([1]) == [1]"]}, FOLDER)
    assert ones.check("def one(numbers): return [True]", [], {}).score == 0
    huge = read_checker({"kind": "tests", "tests": ["power(2) == 4", "power(9) == 0"]}, FOLDER)
    told = huge.check("def power(n): return n ** 2 if n < 9 else 9 ** 9999", [], {}).told
    assert told.startswith("1 of 2 tests passed. power(9) == 0: failed with ValueError: the result holds an integer")


@pytest.mark.skipif(sys.platform != "linux", reason="confined processes need Linux")
def test_formulas_are_equal_by_their_value_and_take_limited_time() -> None:
    checker = read_checker("math", FOLDER)
    checker.prepare()
    assert checker.check("\\frac{1}{2}", ["0.5"], {}).score == checker.check("(x+1)^2", ["x^2+2x+1"], {}).score == 1
    assert checker.check("{", ["x"], {}).score == 0
    hasty = read_checker({"kind": "math", "max_seconds": 1}, FOLDER)
    assert hasty.check("9^{9^{9^{9}}}", ["x"], {}).score == 0


def test_a_function_of_a_file_gives_the_score(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def half(answer, row): return len(answer) / row['length']\n")
    checker = read_checker("own.py:half", tmp_path)
    checker.expect([])
    assert checker.check("ab", [], {"length": 4}).score == 0.5
    with pytest.raises(TypeError, match=r"own.py:half returned 2.0; return a bool, or a number from 0 to 1"):
        checker.check("ab", [], {"length": 1})
    with pytest.raises(ValueError, match=r"own.py:hlf: KeyError: 'hlf'"):
        read_checker("own.py:hlf", tmp_path).expect([])


@pytest.mark.parametrize(
    ("reward", "right", "problem"),
    [
        ("exat", "a", "there is no reward 'exat'; did you mean exact or math?"),
        ("judge", "a", "a judge is a reward of the trainer"),
        ("number", "one", "reward number does not accept the answer 'one'. It is not a number."),
        ({"kind": "number", "tolernce": 1}, "1", "reward number: tolernce: Extra inputs are not permitted"),
        ({"kind": "choice", "choices": ["x", "y"]}, "C", "reward choice does not accept the answer 'C'"),
        ({"kind": "regex", "pattern": "("}, "a", "'(' is no pattern of RE2"),
        ({"kind": "regex", "pattern": "b"}, "a", "reward regex does not accept the answer 'a'"),
        ({"kind": "schema", "schema": {"type": "text"}}, "1", "the schema is no JSON Schema"),
        ({"kind": "schema", "schema": CITY}, "{}", "'city' is a required property"),
        ({"kind": "schema", "schema": {"$ref": "http://localhost:1/x"}}, "1", "the schema refers to"),
        ({"kind": "tests", "tests": ["add(x) == 3"]}, "", "'add(x) == 3' is no test: write function(values) == value"),
        ({"kind": "tests", "tests": ["f(1) == (1,)"]}, "", "is no test"),
        ({"kind": "tests", "tests": ["f(1) == 1", "g(1) == 1"]}, "", "the tests call several functions"),
        ("missing.py:f", "", "FileNotFoundError"),
    ],
)
def test_a_reward_that_cannot_be_is_refused(reward: object, right: str, problem: str) -> None:
    with pytest.raises(Exception) as raised:
        read_checker(reward, FOLDER).expect([right])
    assert isinstance(raised.value, ValueError) and problem in str(raised.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="reward math needs the package math-verify: pip install math-verify"):
        read_checker({"kind": "math", "max_seconds": 7}, FOLDER)
    monkeypatch.undo()
    monkeypatch.setattr("starpod.environments.tasks.checkers.numbers.run_confined", _cannot_confine)
    with pytest.raises(Unavailable, match="reward math: no seccomp; it needs Linux"):
        read_checker("math", FOLDER).prepare()


def _cannot_confine(*_: object, **__: object) -> None:
    raise RuntimeError("no seccomp")
