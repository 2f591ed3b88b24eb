"""The named parts of a turn's reward, and shaping functions of installed packages."""

import sys
from pathlib import Path
from typing import Any

import pytest

from starpod.client import EndReason, Transition
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.reward import RewardConfig, RewardError, Rewards
from tests.trainer.turns import a_turn

EXECUTED, VALID, EFFECTIVE = 1, 2, 4
RAN = EXECUTED | VALID | EFFECTIVE


def make_turn(actions: list[str], **changes: Any) -> Turn:
    return a_turn([2, 3], observation="G_P", actions=actions, **{"finish": "stop", **changes})


def arrive(reward: float, *flags: int) -> Transition:
    return Transition("G_P", reward, tuple(flags), (reward,) * len(flags), b"", EndReason.NONE, None, None)


def score(config: dict[str, Any], turn: Turn, transition: Transition | None) -> dict[str, float]:
    episode = Episode(0, 0, "frozen_lake-v1", seed=7, turns=[turn])
    return Rewards(RewardConfig.model_validate(config)).score(turn, transition, episode)


def test_a_checklist_pays_for_what_begins_to_hold_and_takes_back_what_is_broken() -> None:
    config = {"criteria": {"weight": 2.0, "weights": {"a": 0.5, "b": 0.3, "c": 0.2}}}
    reports = [{"a": True, "b": False, "c": True}, {}, {"a": True, "b": True}, {"a": False}, {"a": True, "d": True}]
    episode = Episode(0, 0, "frozen_lake-v1", seed=7)
    paid = []
    for report in reports:
        turn = make_turn(["Up"], criteria=report)
        episode.turns.append(turn)
        turn.parts = Rewards(RewardConfig.model_validate(config)).score(turn, arrive(0.5, RAN), episode)
        paid.append(turn.parts["criteria"])
    assert paid == pytest.approx([1.4, 0.0, 0.6, -1.0, 3.0])
    assert "criteria" not in score({}, make_turn(["Up"], criteria={"a": True}), arrive(0.5, RAN))


@pytest.mark.parametrize("config", [{}, {"criteria": {"weight": 1}, "overlong_penalty": -1, "format_penalty": 0}])
def test_the_parts_that_are_paid_are_known_before(config: dict[str, Any]) -> None:
    assert RewardConfig.model_validate(config).names == set(score(config, make_turn(["Up"]), arrive(0.5, RAN)))


@pytest.mark.parametrize(
    ("actions", "changes", "transition", "penalised"),
    [
        (["Up"], {}, arrive(0.5, RAN), False),
        (["Up", "Up"], {}, arrive(0.5, RAN, EXECUTED | VALID), False),  # blocked is not wrong
        (["Up", "Up"], {}, arrive(0.5, RAN, VALID), False),  # cut off by a limit or the end: not wrong
        (["Up", "Jump"], {"well_formed": False}, arrive(0.5, RAN, 0), True),
        (["Up", "Jump", "Fly"], {}, arrive(0.5, RAN, 0, 0), True),  # once, however many
        (["place 99"], {}, arrive(0.5, EXECUTED), True),  # the environment could not make sense of it
        ([], {"well_formed": False}, None, True),
        (["Up"], {"well_formed": False}, arrive(0.5, RAN), True),
    ],
)
def test_the_format_penalty_is_taken_once(
    actions: list[str], changes: dict[str, Any], transition: Transition | None, penalised: bool
) -> None:
    parts = score({"format_penalty": -0.25}, make_turn(actions, **changes), transition)
    assert parts == {"environment": 0.5 if transition else 0.0, "format": -0.25 if penalised else 0.0}


def test_parts_that_are_off_are_not_there() -> None:
    assert score({"format_penalty": 0}, make_turn([]), None) == {"environment": 0.0}


def test_a_reply_that_was_cut_off_can_cost() -> None:
    for finish, expected in (("stop", 0.0), ("length", -0.5)):
        parts = score({"overlong_penalty": -0.5}, make_turn(["Up"], finish=finish), arrive(0.0, RAN))
        assert parts["overlong"] == expected


def test_reasoning_is_a_part_with_its_weight() -> None:
    config = {"reasoning": {"weight": 0.2, "claims": 1}}
    turn = make_turn(["Left"])
    for thought, expected in (("the goal is left", 0.2), ("the goal is right", -0.2), ("left then", 0.0)):
        turn.thought = thought
        assert score(config, turn, arrive(1.0, RAN))["reasoning"] == pytest.approx(expected)


def test_reasoning_says_where_it_cannot_be_used() -> None:
    turn = make_turn(["Left"])
    rewards = Rewards(RewardConfig.model_validate({"reasoning": {"weight": 0.2}}))
    with pytest.raises(RewardError, match=r"rewards\.reasoning cannot be used here: .* not for bandit-v1"):
        rewards.score(turn, arrive(1.0, RAN), Episode(0, 0, "bandit-v1", turns=[turn]))


@pytest.mark.parametrize(
    "config",
    [
        {"format_penalty": 0.1},
        {"overlong_penalty": 1},
        {"format_penalty": float("nan")},
        {"shaping": {"format": 1.0}},
        {"shaping": {"x": {"wieght": 1}}},
        {"reasoning": {"weight": -1}},
    ],
)
def test_senseless_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        RewardConfig.model_validate(config)


# --- shaping functions -------------------------------------------------------------------------------------------

PLUGIN = '''
"""A package that somebody else wrote."""

def effort(turn, transition, episode, *, per_token=1.0):
    return -per_token * len(turn.reply)

def last(turn, transition, episode):
    return float(episode.turns[-1] is turn)

def broken(turn, transition, episode):
    return {}["goal"]

def endless(turn, transition, episode):
    return float("inf")

def narrow(turn):
    return 0.0

constant = 3
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a distribution whose functions are registered in the entry-point group."""
    (tmp_path / "effort_rewards.py").write_text(PLUGIN)
    folder = tmp_path / "effort_rewards-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: effort-rewards\nVersion: 1.0\n")
    names = ("effort", "last", "broken", "endless", "narrow", "constant")
    lines = [f"{name} = effort_rewards:{name}" for name in names]
    lines.append("absent = effort_rewards:absent")
    (folder / "entry_points.txt").write_text("[starpod.rewards]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "effort_rewards", raising=False)


@pytest.mark.usefixtures("plugin")
def test_registered_functions_are_weighted_parts() -> None:
    shaping = {"effort": {"weight": 0.5, "parameters": {"per_token": 0.1}}, "last": 2}
    parts = score({"shaping": shaping}, make_turn(["Up"]), arrive(1.0, RAN))
    assert parts == pytest.approx({"environment": 1.0, "format": 0.0, "effort": -0.1, "last": 2.0})


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("shaping", "words"),
    [
        ({"efort": 1.0}, ["no reward function 'efort'", "did you mean effort?", "starpod.rewards"]),
        ({"absent": 1.0}, ["'absent' of effort-rewards", "cannot be loaded"]),
        ({"narrow": 1.0}, ["'narrow' of effort-rewards", "does not take (turn, transition, episode)"]),
        ({"constant": 1.0}, ["is a int, not a function"]),
        ({"effort": {"parameters": {"per_tokn": 1}}}, ["'effort' of effort-rewards", "per_tokn"]),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(shaping: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        Rewards(RewardConfig.model_validate({"shaping": shaping}))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("name", "words"), [("broken", ["KeyError: 'goal'"]), ("endless", ["inf, which is not a finite number"])]
)
def test_a_function_that_fails_is_named_with_the_turn(name: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        score({"shaping": {name: 1.0}}, make_turn(["Up"]), arrive(1.0, RAN))
    for word in (repr(name), "turn 1 of frozen_lake-v1", "seed 7", *words):
        assert word in str(caught.value)


def test_keeping_a_subgoal_costs_a_share_of_the_episode_and_changing_it_unsaid_costs_at_once() -> None:
    rewards = Rewards(RewardConfig.model_validate({"subgoals": {"keep_penalty": -3.5, "consistency_penalty": -0.3}}))
    episode = Episode(0, 0, "frozen_lake-v1", seed=7)
    for switch, subgoal in (("KEEP", "box"), ("KEEP", "target"), ("switch", "box"), ("KEEP", "box")):
        turn = make_turn(["Up"], blocks={"switch": switch, "subgoal": subgoal})
        episode.turns.append(turn)
        turn.parts = rewards.score(turn, arrive(1.0, RAN), episode)
    rewards.settle(episode)
    assert [turn.parts["keep"] for turn in episode.turns] == [0.0, -0.875, 0.0, -0.875]
    assert [turn.parts["consistency"] for turn in episode.turns] == [0.0, -0.3, 0.0, 0.0]
    assert [turn.reward for turn in episode.turns] == pytest.approx([1.0, -0.175, 1.0, 0.125])
    rewards.settle(episode)
    assert episode.turns[1].reward == pytest.approx(-0.175)
