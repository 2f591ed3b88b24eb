"""Relations between things: golden cases, what is read from a text, and that a served state is told in full."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.client import EndReason, Transition
from starpod.trainer.config import ConfigError, load_config
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.relations import Relation, compare, describe, read_relations
from starpod.trainer.rewards.reward import RewardConfig, RewardError, Rewards
from starpod.trainer.rewards.scene import legend_of

LAKE, AFTER = "G___\nO__P\n____\n___O", "G__P\nO___\n____\n___O"
ROOM = "######\n#S_X_#\n#√___#\n#____#\n######"
CONFIG = {"format_penalty": 0, "relations": {"description": 0.5, "prediction": 0.25}}


def lake(**things: Sequence[Relation]) -> dict[str, Sequence[Relation]]:
    return things


@pytest.mark.parametrize(
    ("said", "true", "expected"),
    [
        # Half right on the goal, one of two holes: 0.7 * 0.5 + 0.3 * 2/3.
        (
            lake(goal=[("Up", "Left")], hole=[("Down", "-")]),
            lake(goal=[("Up", "Right")], hole=[("Down", "-"), ("Up", "Left")]),
            0.55,
        ),
        # The best pairs are 1 + 0.5 of two holes.
        (
            lake(goal=[("Up", "-")], hole=[("Up", "Left"), ("Down", "-")]),
            lake(goal=[("Up", "-")], hole=[("Down", "-"), ("Up", "Right")]),
            0.925,
        ),
        (lake(), lake(), 1.0),
        (lake(), lake(goal=[("Up", "-")]), 0.0),
        (lake(goal=[("Up", "-")]), lake(goal=[("Up", "-")]), 1.0),
        (lake(goal=[("Up", "-")] * 3), lake(goal=[("Up", "-")]), 0.5),
    ],
)
def test_of_a_lake(said: dict[str, Sequence[Relation]], true: dict[str, Sequence[Relation]], expected: float) -> None:
    assert compare("frozen_lake", said, true) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("box", "expected"), [(("Up", "-"), 0.5), (("Up", "Left"), 0.5), (("Up", "Right"), 1.0)])
def test_of_a_room_both_axes_must_be_right(box: Relation, expected: float) -> None:
    true = {"target": [("-", "Left")], "box": [("Up", "Right")]}
    assert compare("sokoban", {"target": [("-", "Left")], "box": [box]}, true) == expected


_AXES = st.sampled_from(["Up", "-", "Down"]), st.sampled_from(["Left", "-", "Right"])
_RELATIONS = st.lists(st.tuples(*_AXES), max_size=5)


@given(_RELATIONS, _RELATIONS)
def test_no_pairing_is_better(said: list[Relation], true: list[Relation]) -> None:
    def alike(one: Relation, other: Relation) -> float:
        return sum(map(str.__eq__, one, other)) / 2

    few, many = sorted((said, true), key=len)
    best = max(sum(map(alike, few, order)) for order in itertools.permutations(many, len(few)))
    expected = 2 * best / (len(said) + len(true)) if said or true else 1.0
    assert compare("frozen_lake", {"hole": said}, {"hole": true}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "goal", "holes"),
    [
        ("goal Up Left hole - Left", [("Up", "Left")], [("-", "Left")]),
        ("The goal is above me and to the left; a hole is below.", [("Up", "Left")], [("Down", "-")]),
        ("G Up Left O Down -", [("Up", "Left")], [("Down", "-")]),
        ("the target is up", [("Up", "-")], []),
        ("Up Left and nothing else", [], []),
        ("", [], []),
    ],
)
def test_names_and_symbols_with_the_directions_after_them_are_read(
    text: str, goal: list[Relation], holes: list[Relation]
) -> None:
    assert read_relations(text, "frozen_lake", legend_of("frozen_lake", "")) == {"goal": goal, "hole": holes}


@pytest.mark.parametrize(("environment", "observation"), [("frozen_lake-v1", LAKE), ("sokoban-v1", ROOM)])
def test_what_is_described_is_wholly_right(environment: str, observation: str) -> None:
    text = describe(environment, "", observation)
    turn = Turn(observation=observation, fresh=True, blocks={"description": text})
    episode = Episode(0, 0, environment, turns=[turn])
    assert Rewards(RewardConfig.model_validate(CONFIG)).score(turn, None, episode)["description"] == 0.5


def paid(blocks: dict[str, str], *, observation: str = LAKE, well_formed: bool = True) -> dict[str, float]:
    turn = Turn(observation=observation, fresh=True, blocks=blocks, well_formed=well_formed)
    transition = Transition(AFTER, 0.0, 7, 0.0, b"", EndReason.NONE, None, None)
    return Rewards(RewardConfig.model_validate(CONFIG)).score(
        turn, transition, Episode(0, 0, "frozen_lake-v1", turns=[turn])
    )


def test_a_description_is_of_the_state_before_the_turn_and_a_prediction_of_that_after_it() -> None:
    before, after = describe("frozen_lake-v1", "", LAKE), describe("frozen_lake-v1", "", AFTER)
    assert paid({"description": before, "prediction": after}) == {
        "environment": 0.0,
        "description": 0.5,
        "prediction": 0.25,
    }
    wrong = paid({"description": after, "prediction": before})
    assert 0 < wrong["description"] < 0.5
    assert 0 < wrong["prediction"] < 0.25
    assert paid({}) == paid({"description": before, "prediction": after}, well_formed=False)
    assert paid({})["description"] == 0


def test_an_observation_that_hides_some_things_is_refused() -> None:
    with pytest.raises(RewardError, match=r"all things of the kind hole, .*options.observation to grid"):
        paid({"description": "goal Up -"}, observation="P 1 3 G 0 0 Up Left _ _ # _")


def test_blocks_that_are_paid_for_must_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="pays for the block prediction, which replies do not have"):
        load_config("frozen_lake", ["rewards.relations.prediction=0.1", "prompt.blocks=[description]"])


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("success", "calls", "expected"), [(True, 0, 1.0), (True, 3, 1.3), (False, 5, 0.0), (None, 5, 0.0)]
)
def test_tools_are_paid_in_a_success_alone(success: bool | None, calls: int, expected: float) -> None:
    turns = [Turn(fresh=True, actions=["Look"] * calls, executed=calls), Turn(fresh=False, actions=["buy"], executed=1)]
    turns[-1].parts["environment"] = float(success or 0)
    episode = Episode(0, 0, "shop-v1", turns=turns, success=success)
    Rewards(RewardConfig.model_validate({"tools": {"bonus": 0.1, "actions": ["look"]}})).settle(episode)
    assert episode.total_reward == pytest.approx(expected)
    assert "tools" in RewardConfig.model_validate({"tools": {"bonus": 0.1}}).names


def test_what_was_not_executed_is_not_paid() -> None:
    turn = Turn(fresh=True, actions=["a", "b", "c"], executed=2)
    Rewards(RewardConfig.model_validate({"tools": {"bonus": 1}})).settle(Episode(0, 0, "x", turns=[turn], success=True))
    assert turn.parts == {"tools": 2.0}
