"""The named parts of a turn's reward, and shaping functions of installed packages."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from starpod.client import EndReason, Transition
from starpod.trainer.commands.train import train
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.run.interrupts import Interrupts
from tests.trainer.turns import a_turn

EXECUTED, VALID, EFFECTIVE = 1, 2, 4
RAN = EXECUTED | VALID | EFFECTIVE


def make_turn(actions: list[str], **changes: Any) -> Turn:
    return a_turn([2, 3], observation="G_P", actions=actions, **{"finish": "stop", **changes})


def arrive(reward: float, *flags: int) -> Transition:
    return Transition("G_P", reward, tuple(flags), (reward,) * len(flags), b"", EndReason.NONE, None, None)


def score(
    config: dict[str, Any], turn: Turn, transition: Transition | None, environment: str = "frozen_lake-v1"
) -> dict[str, float]:
    episode = Episode(0, 0, environment, seed=7, turns=[turn])
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


UP, CUT = make_turn(["Up"]), make_turn(["Up"], finish="length")
ILL = {"well_formed": False}
FINED = {"format_penalty": -0.25}
REASONING = {"reasoning": {"weight": 0.2, "claims": 1}, "format_penalty": 0}


@pytest.mark.parametrize(
    ("config", "turn", "transition", "expected"),
    [
        ({"format_penalty": 0}, make_turn([]), None, {}),
        (FINED, UP, arrive(0.5, RAN), {"format": 0}),
        (FINED, make_turn(["Up", "Up"]), arrive(0.5, RAN, EXECUTED | VALID), {"format": 0}),  # blocked is not wrong
        (FINED, make_turn(["Up", "Up"]), arrive(0.5, RAN, VALID), {"format": 0}),  # and neither is cut off by the end
        (FINED, make_turn(["Up", "Jump"], **ILL), arrive(0.5, RAN, 0), {"format": -0.25}),
        (FINED, make_turn(["Up", "Jump", "Fly"]), arrive(0.5, RAN, 0, 0), {"format": -0.25}),  # once, however many
        (FINED, make_turn(["place 99"]), arrive(0.5, EXECUTED), {"format": -0.25}),  # makes no sense there
        (FINED, make_turn([], **ILL), None, {"format": -0.25}),
        (FINED, make_turn(["Up"], **ILL), arrive(0.5, RAN), {"format": -0.25}),
        ({"overlong_penalty": -0.5}, UP, arrive(0.0, RAN), {"format": 0, "overlong": 0}),
        ({"overlong_penalty": -0.5}, CUT, arrive(0.0, RAN), {"format": 0, "overlong": -0.5}),
        (REASONING, make_turn(["Left"], thought="the goal is left"), arrive(1.0, RAN), {"reasoning": 0.2}),
        (REASONING, make_turn(["Left"], thought="the goal is right"), arrive(1.0, RAN), {"reasoning": -0.2}),
        (REASONING, make_turn(["Left"], thought="left then"), arrive(1.0, RAN), {"reasoning": 0}),
        ({"criteria": {"weight": 1}, "format_penalty": 0}, make_turn([], criteria={"a": True}), None, {"criteria": 1}),
        ({}, make_turn([], criteria={"a": True}), None, {"format": 0}),
    ],
)
def test_a_reward_has_the_parts_that_are_configured(
    config: dict[str, Any], turn: Turn, transition: Transition | None, expected: dict[str, float]
) -> None:
    expected = {"environment": transition.reward if transition else 0.0} | expected
    assert score(config, turn, transition) == pytest.approx(expected)
    assert RewardConfig.model_validate(config).names == set(expected)


@pytest.mark.parametrize(
    "config",
    [
        *({"format_penalty": value} for value in (0.1, float("nan"))),
        {"overlong_penalty": 1},
        *({"shaping": value} for value in ({"format": 1.0}, {"x": {"wieght": 1}})),
        {"reasoning": {"weight": -1}},
    ],
)
def test_senseless_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        RewardConfig.model_validate(config)


# --- shaping functions -------------------------------------------------------------------------------------------

PLUGIN = '''
"""A package that somebody else wrote."""
import os
import sys

def effort(turn, transition, view, *, per_token=1.0):
    return -per_token * len(turn.reply)

def last(turn, transition, view):
    return float(view.turns[-1] is turn and view.previous is None)

def broken(turn, transition, view):
    return {}["goal"]

def endless(turn, transition, view):
    return float("inf")

def narrow(turn):
    return 0.0

def huge(turn, transition, view):
    return 1e308

def leaving(turn, transition, view):
    sys.exit(0)

def cancelled(turn, transition, view):
    raise KeyboardInterrupt

def forking(turn, transition, view):
    return float(os.fork() == 0)

constant = 3
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a distribution whose functions are registered in the entry-point group."""
    (tmp_path / "effort_rewards.py").write_text(PLUGIN)
    folder = tmp_path / "effort_rewards-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: effort-rewards\nVersion: 1.0\n")
    names = ("effort", "last", "broken", "endless", "narrow", "constant", "absent", "huge", "leaving", "cancelled")
    lines = "".join(f"{name} = effort_rewards:{name}\n" for name in names)
    (folder / "entry_points.txt").write_text(f"[starpod.rewards]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "effort_rewards", raising=False)


@pytest.mark.usefixtures("plugin")
def test_registered_functions_are_weighted_parts() -> None:
    shaping = {"effort": {"weight": 0.5, "parameters": {"per_token": 0.1}}, "last": 2}
    parts = score({"shaping": shaping}, make_turn(["Up"]), arrive(1.0, RAN))
    assert parts == pytest.approx({"environment": 1.0, "format": 0.0, "effort": -0.1, "last": 2.0})


def test_functions_of_a_file_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    given = {"mine.py:effort": {"weight": 0.5, "parameters": {"per_token": 0.1}}, "mine.py:last": 2}
    config = RewardConfig.model_validate({"shaping": given})
    monkeypatch.chdir("/")  # where a run is resumed from
    shaping = config.model_dump(mode="json")["shaping"]
    parts = score({"shaping": shaping}, make_turn(["Up"]), arrive(1.0, RAN))
    assert parts == pytest.approx({"environment": 1.0, "format": 0.0, "effort": -0.1, "last": 2.0})
    for name, words in (
        ("efort", "mine.py.*it defines no efort; did you mean effort"),
        ("narrow", "mine.py.*not take"),
    ):
        with pytest.raises(ConfigError, match=words):
            Rewards(RewardConfig.model_validate({"shaping": {f"{tmp_path}/mine.py:{name}": 1.0}}))


def test_an_unknown_function_is_reported_before_anything_is_started() -> None:
    for words in (["rewards.shaping={brevty: 1}"], ["rewards.shaping={absent.py:brevity: 1}", "--dry-run"]):
        done = CliRunner().invoke(train, ["frozen_lake", *words])
        assert done.exit_code == 2 and "brev" in done.output


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("shaping", "words"),
    [
        ({"efort": 1.0}, r"no reward function 'efort'.*did you mean effort\?.*starpod\.rewards"),
        ({"absent": 1.0}, "'absent' of effort-rewards.*cannot be loaded"),
        ({"narrow": 1.0}, r"'narrow' of effort-rewards.*does not take \(turn, transition, view\)"),
        ({"constant": 1.0}, "is a int, not a function"),
        ({"effort": {"parameters": {"per_tokn": 1}}}, "'effort' of effort-rewards.*per_tokn"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(shaping: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Rewards(RewardConfig.model_validate({"shaping": shaping}))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("config", "environment", "words"),
    [
        (
            {"shaping": {"broken": 1.0}},
            "frozen_lake-v1",
            "'broken'.*turn 1 of frozen_lake-v1, seed 7.*KeyError: 'goal' \\(.*py, line",
        ),
        ({"shaping": {"endless": 1.0}}, "lake-v9", "'endless'.*turn 1 of lake-v9, seed 7.*inf, which is not a finite"),
        ({"shaping": {"huge": 1.0}}, "lake-v9", r"'huge'.*1e\+308, which is not .* to 1e\+12 \(.*rewards.py, line"),
        (
            {"shaping": {"leaving": 1.0}},
            "lake-v9",
            r"it ends the program, with sys.exit\(0\) \(.*rewards.py, line",
        ),
        ({"shaping": {"cancelled": 1.0}}, "lake-v9", r"with KeyboardInterrupt \(.*rewards.py, line"),
        (REASONING, "bandit-v1", r"reward function 'reasoning' failed on turn 1 of bandit-v1, .* not for bandit-v1"),
    ],
)
def test_a_part_that_fails_is_named_with_the_turn(config: dict[str, Any], environment: str, words: str) -> None:
    # Python's own handler would make a KeyboardInterrupt of the function look like Ctrl-C.
    with Interrupts(), pytest.raises(UserCodeError, match=words):
        score(config, UP, arrive(1.0, RAN), environment)


def test_a_process_that_a_function_forks_ends_with_the_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    program = (
        "from starpod.trainer.rewards.reward import *\n"
        f"rewards = Rewards(RewardConfig.model_validate({{'shaping': {{'{tmp_path}/mine.py:forking': 1.0}}}}))\n"
        "turn, episode = Turn(fresh=True), Episode(0, 0, 'lake')\n"
        "episode.turns.append(turn)\n"
        "print(rewards.score(turn, None, episode)['forking'], flush=True)\n"
        "import os; os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0.0\n" and "reward function 'forking' failed on turn 1" in done.stderr


def test_a_configured_factor_cannot_lift_a_reward_above_the_bound() -> None:
    turn = make_turn(["Up"])
    with pytest.raises(ConfigError, match=r"the reward part 'effort' of a turn is -1e\+13"):
        turn.pay({"effort": -1e13})


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
