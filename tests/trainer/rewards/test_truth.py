"""Rewards for true claims, for each speaker, and bonuses for tools."""

from typing import Any

import pytest

from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import DONE, Episode, Turn
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rewards.truth import RelationsConfig, punish_repetition
from tests.trainer.turns import NOT_DONE


def test_what_is_repeated_most_and_wrong_is_fined() -> None:
    """Five texts that come back, of which one is right; others come once."""
    config = RelationsConfig(description=0.5, repetition=-0.1)
    said = ["a", "b", "c", "d", "e"] * 2 + ["f", "g"]
    turns = [
        Turn(fresh=True, blocks={"description": text}, parts={"environment": 1.0, "description": 0.5 * score})
        for text, score in zip(said, [0.6] * 3 + [0.7] * 2 + [0.0] * 7, strict=True)
    ]
    before = [dict(turn.parts) for turn in turns]
    parent = Episode(0, 0, "frozen_lake-v1", turns=turns[:6])
    # What a branch shares with its parent counts once: else f would come back.
    branch = Episode(0, 1, "frozen_lake-v1", turns=[*turns[:6], *turns[6:]], parent=(0, 6))
    punish_repetition(config.model_copy(update={"repetition": 0.0}), [parent, branch])
    assert [turn.parts for turn in turns] == before
    punish_repetition(config, [parent, branch])
    assert [turn.parts["description"] for turn in turns] == [-0.05] * 3 + [0.35] * 2 + [-0.05] * 5 + [0.0] * 2
    assert turns[0].reward == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"rewards": {"relations": {"prediction": 0.1}}, "prompt": {"blocks": ["description"]}},
            "pays for the block prediction, which replies do not have",
        ),
        ({"rewards": {"relations": {"intended": True, "description": 0.5}}}, "prediction, or drop it"),
        ({"rewards": {"relations": {"repetition": -0.1}}}, "set rewards.relations.description or prediction"),
    ],
)
def test_settings_that_pay_for_nothing_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(values)


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("success", "calls", "expected"), [(True, 0, 1.0), (True, 3, 1.3), (False, 5, 0.0), (None, 5, 0.0)]
)
def test_executed_tools_are_paid_in_a_success_alone(success: bool | None, calls: int, expected: float) -> None:
    looks = ["Look", 'Look {"at": "Up"}', "Look", "Look", "Look", "Look"][: calls + 1]  # the last one is not executed
    outcomes = [DONE] * calls + [NOT_DONE]
    turns = [Turn(fresh=True, actions=looks, outcomes=outcomes), Turn(fresh=False, actions=["buy"], outcomes=[DONE])]
    turns[-1].parts["environment"] = float(success or 0)
    episode = Episode(0, 0, "shop-v1", turns=turns, success=success)
    Rewards(RewardConfig.model_validate({"tools": {"bonus": 0.1, "actions": ["look"]}})).settle(episode)
    assert episode.total_reward == pytest.approx(expected)
    config = RewardConfig.model_validate({"tools": {"bonus": 0.1}})
    assert "tools" in config.names
    Rewards(config).settle(episode)
    assert turns[-1].parts["tools"] == pytest.approx(0.1 * (calls + 1) if success else 0.0)
