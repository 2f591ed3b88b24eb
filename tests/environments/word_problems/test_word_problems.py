"""word_problems-v1: stories that their steps answer, both ways of answering, criteria and hostile texts."""

import functools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import Want
from starpod.environments.countdown.expression import parse
from starpod.environments.word_problems import WordProblems
from starpod.environments.word_problems.environment import read_equations
from starpod.environments.word_problems.stories import draw_problem
from tests.environments import episodes

start = functools.partial(episodes.start, WordProblems)
SEEDS = st.integers(0, 2**64 - 1)


@given(seed=SEEDS, steps=st.integers(1, 8), largest=st.sampled_from([5, 50, 1000]), distractors=st.integers(0, 4))
def test_steps_are_as_many_as_asked_and_use_facts_of_the_story(
    seed: int, steps: int, largest: int, distractors: int
) -> None:
    rng = random.Random(seed)
    problem = draw_problem(rng, min_steps=steps, max_steps=steps, largest=largest, distractors=distractors)
    words = {"twice": 2, "three": 3}
    told = {words.get(word) or int(word) for word in re.findall(r"[0-9]+|twice|three", problem.text)}
    known = set(told)
    assert len(problem.steps) == steps
    for expression, result in problem.steps:
        parsed = parse(expression)
        assert parsed.value == result > 0
        assert set(parsed.numbers) <= known, problem
        known.add(result)
    assert len(re.findall("[0-9]+|twice|three times", problem.text)) >= steps + distractors - 1


def test_problems_are_many() -> None:
    assert len({start(seed).environment.text for seed in range(300)}) == 300


@pytest.mark.parametrize("mode", ["calculator", "steps"])
@given(seed=SEEDS)
def test_the_expert_is_right_and_its_score_rises(mode: str, seed: int) -> None:
    episode = start(seed, mode=mode)
    assert episode.environment.score() == 0
    assert episodes.play_expertly(episode)[-1].reward == 1


def test_the_calculator_shows_values_and_a_wrong_answer_ends_the_episode() -> None:
    episode = start(3)
    environment = episode.environment
    assert episode.turn(["calculate[(2 + 3) * 4]"], Want()).parts == "(2 + 3) * 4 = 20"
    assert episode.turn(["calculate[1 / 0]"], Want()).parts == "1 / 0 = undefined"
    assert len(episode.turn(["Calculate[ 9 ** 999 ]"], Want()).parts) < 60
    transition = episode.turn([f"answer[{environment.steps[-1][1] + 1}]"], Want())
    assert (transition.reward, transition.success, environment.score()) == (0, False, 0)
    assert transition.details is not None and transition.details.criteria is not None
    assert not any(transition.details.criteria.values())


def test_a_reply_of_steps_is_checked_equation_by_equation() -> None:
    equations = read_equations("So 2 + 3 = 5 apples.\nx = y\n4*5 = 21\n$7 / 2 = 3.5\n= 4\n1 + 1 =\n7 = 7")
    assert [(equation.value, equation.claim) for equation in equations] == [(5, 5), (20, 21)]
    episode = start(4, mode="steps", min_steps=2)
    steps = episode.environment.steps
    reply = f"{steps[0][0]} = {steps[0][1]}\n1 + 1 = 3\n#### 7\n#### {steps[-1][1]}.00"
    transition = episode.turn([reply], Want())
    assert transition.details is not None and transition.details.criteria is not None
    told = transition.details.criteria
    assert transition.success and told["step_1"] and not told["equations_hold"]


@pytest.mark.parametrize("trivial", ["{0}", "+{0}", "{0} * 1", "{0} + 0", "{1} + 1", "(40 - {0}) - (40 - 2 * {0})"])
def test_a_result_that_is_not_calculated_from_the_story_counts_for_nothing(trivial: str) -> None:
    lines = [trivial.format(number, number - 1) for number in range(1, 41)]
    for seed in range(20):
        episode = start(seed, mode="steps", max_number=10)
        details = episode.turn(
            ["\n".join(f"{line} = {n}" for n, line in enumerate(lines, 1)) + "\n#### -1"], Want()
        ).details
        assert details is not None and details.criteria is not None
        assert not any(details.criteria.values()), (episode.environment.text, details.criteria)
        episode = start(seed, max_number=10, max_steps=2)
        episode.turn([f"calculate[{trivial.format(n := episode.environment.steps[0][1], n - 1)}]"], Want())
        assert episode.environment.score() == 0


def test_a_reply_without_an_answer_ends_without_success() -> None:
    for reply in ("no idea", "#### many", "=" * 3000, "1+" * 1500 + "= 4"):
        transition = start(1, mode="steps").turn([reply], Want())
        assert transition.terminated and transition.success is False and transition.reward == 0


def test_work_is_bounded() -> None:
    episode = start(1)
    for number in range(100):
        episode.turn([f"calculate[{number} + 1]"], Want())
    assert len(episode.save()) < 4096
