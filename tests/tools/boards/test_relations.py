"""Relations between things: golden cases, reading them from text, and full descriptions of served states."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.boards.relations import Relation, describe_turn, description, read_relations, relations_f1
from starpod.boards.scene import legend_of
from starpod.client import EndReason, Transition
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rewards.view import TurnView

LAKE, AFTER = "G___\nO__P\n____\n___O", "G__P\nO___\n____\n___O"
ROOM = "######\n#S_X_#\n#√___#\n#____#\n######"
PAID = {"description": 0.5, "prediction": 0.25}
Told = dict[str, Sequence[Relation]]
UP, DOWN, LEFT, UP_LEFT, UP_RIGHT = ("Up", "-"), ("Down", "-"), ("-", "Left"), ("Up", "Left"), ("Up", "Right")
IN_ROOM = {"target": [LEFT], "box": [UP_RIGHT]}


@pytest.mark.parametrize(
    ("family", "said", "true", "expected"),
    [
        # Half right on the goal, one of two holes: 0.7 * 0.5 + 0.3 * 2/3.
        ("frozen_lake", {"goal": [UP_LEFT], "hole": [DOWN]}, {"goal": [UP_RIGHT], "hole": [DOWN, UP_LEFT]}, 0.55),
        # The best pairs are 1 + 0.5 of two holes.
        ("frozen_lake", {"goal": [UP], "hole": [UP_LEFT, DOWN]}, {"goal": [UP], "hole": [DOWN, UP_RIGHT]}, 0.925),
        ("frozen_lake", {}, {}, 1.0),
        ("frozen_lake", {}, {"goal": [UP]}, 0.0),
        ("frozen_lake", {"goal": [UP]}, {"goal": [UP]}, 1.0),
        ("frozen_lake", {"goal": [UP] * 3}, {"goal": [UP]}, 0.5),
        # In a room both axes must be right.
        ("sokoban", IN_ROOM | {"box": [UP]}, IN_ROOM, 0.5),
        ("sokoban", IN_ROOM | {"box": [UP_LEFT]}, IN_ROOM, 0.5),
        ("sokoban", IN_ROOM, IN_ROOM, 1.0),
    ],
)
def test_relations_are_compared_by_f1(family: str, said: Told, true: Told, expected: float) -> None:
    assert relations_f1(family, said, true) == pytest.approx(expected, abs=1e-6)


_AXES = st.sampled_from(["Up", "-", "Down"]), st.sampled_from(["Left", "-", "Right"])
_RELATIONS = st.lists(st.tuples(*_AXES), max_size=5)


@given(_RELATIONS, _RELATIONS)
def test_no_pairing_is_better(said: list[Relation], true: list[Relation]) -> None:
    def alike(one: Relation, other: Relation) -> float:
        return sum(map(str.__eq__, one, other)) / 2

    few, many = sorted((said, true), key=len)
    best = max(sum(map(alike, few, order)) for order in itertools.permutations(many, len(few)))
    expected = 2 * best / (len(said) + len(true)) if said or true else 1.0
    assert relations_f1("frozen_lake", {"hole": said}, {"hole": true}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "goal", "holes"),
    [
        ("goal Up Left hole - Left", [UP_LEFT], [LEFT]),
        ("The goal is above me and to the left; a hole is below.", [UP_LEFT], [DOWN]),
        ("G Up Left O Down -", [UP_LEFT], [DOWN]),
        ("the target is up", [UP], []),
        *((text, [], []) for text in ("Up Left and nothing else", "")),
    ],
)
def test_names_and_symbols_are_read_with_the_directions_after_them(
    text: str, goal: list[Relation], holes: list[Relation]
) -> None:
    assert read_relations(text, "frozen_lake", legend_of("frozen_lake", "")) == {"goal": goal, "hole": holes}


@pytest.mark.parametrize(("environment", "observation"), [("frozen_lake-v1", LAKE), ("sokoban-v1", ROOM)])
def test_what_is_described_is_wholly_right(environment: str, observation: str) -> None:
    turn = Turn(observation=observation, fresh=True)
    episode = Episode(0, 0, environment, turns=[turn])
    turn.blocks["description"] = describe_turn(episode, turn, observation)["relations"]
    assert description(turn, None, TurnView.of(turn, episode)) == 1.0


def described(observation: str, after: str = AFTER, actions: Sequence[str] = ()) -> dict[str, str]:
    turn = Turn(observation=observation, fresh=True, actions=list(actions))
    return describe_turn(Episode(0, 0, "frozen_lake-v1", turns=[turn]), turn, after)


def paid(blocks: dict[str, str], observation: str = LAKE, intended: bool = False, **values: Any) -> dict[str, float]:
    turn = Turn(observation=observation, fresh=True, blocks=blocks, **values)
    transition = Transition(AFTER, 0.0, 7, 0.0, b"", EndReason.NONE, None, None)
    config = RewardConfig.model_validate({"format_penalty": 0, "relations": {**PAID, "intended": intended}})
    return Rewards(config).score(turn, transition, Episode(0, 0, "frozen_lake-v1", turns=[turn]))


def test_a_description_is_of_the_state_before_the_turn_and_a_prediction_of_that_after_it() -> None:
    before, after = described(LAKE)["relations"], described(LAKE)["next_relations"]
    assert paid({"description": before, "prediction": after}) == {"environment": 0.0, **PAID}
    wrong = paid({"description": after, "prediction": before})
    assert 0 < wrong["description"] < 0.5 and 0 < wrong["prediction"] < 0.25
    assert paid({}) == paid({"description": before, "prediction": after}, well_formed=False)
    assert paid({})["description"] == 0
    with pytest.raises(UserCodeError, match=r"kind hole, .*options.observation"):
        paid({"description": "goal Up -"}, "P 1 3 G 0 0 Up Left _ _ # _")


@pytest.mark.parametrize(
    ("actions", "meant"),
    [
        (["Down", "Left"], "G___\nO___\n__P_\n___O"),
        (["Right", "Right"], LAKE),  # beyond the border
        (["up", "jump", "Left"], "G_P_\nO___\n____\n___O"),
        (["Down", "Down", "Left"], "G___\nO___\n____\n___X"),  # the hole ends it
    ],
)
def test_on_ice_that_slips_a_prediction_may_be_of_what_was_meant(actions: list[str], meant: str) -> None:
    """Something else came, which nobody could foresee."""
    told, came = described(meant)["relations"], described(LAKE)["next_relations"]
    assert described(LAKE, AFTER, actions)["intended_relations"] == told
    assert paid({"prediction": told}, actions=actions, intended=True)["prediction"] == 0.25
    assert paid({"prediction": told}, actions=actions)["prediction"] < 0.25
    assert paid({"prediction": came}, actions=actions, intended=True)["prediction"] < 0.25


def test_intended_relations_in_a_room_are_the_next_ones() -> None:
    turn = Turn(observation=ROOM, fresh=True, actions=["Right"])
    after = "######\n#OPX_#\n#√___#\n#____#\n######"
    told = describe_turn(Episode(0, 0, "sokoban-v1", turns=[turn]), turn, after)
    assert told["intended_relations"] == told["next_relations"] != told["relations"]
