"""Demonstrations written down as replies."""

import pytest

from starpod.client import Limits
from starpod.trainer.agents.script import ScriptConfig
from starpod.trainer.config import parse_config
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.section import ConfigError
from starpod.trainer.warmstart import Demonstration, DemonstrationWriter, WarmStartConfig

TURN = Turn(observation="P 0 1 G 2 2", fresh=True, actions=["Left"])


def say(thought: str) -> str:
    return DemonstrationWriter(WarmStartConfig(thought=thought), PromptConfig(), ("Left",)).reply(TURN)


def test_a_thought_is_made_of_the_action_and_the_words_of_the_observation() -> None:
    assert "<think>2 2 so Left</think>" in say("{words[4]} {words[5]} so {action}")


@pytest.mark.parametrize("thought", ["{words[6]}", "{move}", "{words.first}", "{action", "{}"])
def test_a_thought_that_does_not_fit_the_observation_is_told(thought: str) -> None:
    with pytest.raises(ConfigError, match=r"warm_start\.thought .* for the observation 'P 0 1 G 2 2'"):
        say(thought)


@pytest.mark.parametrize(
    ("model", "rate"),
    [({"name": "tiny"}, 1e-3), ({"name": "smollm2"}, 2e-5), ({"name": "smollm2", "lora": {"rank": 8}}, 1e-4)],
)
def test_the_rate_of_imitation_fits_the_model(model: dict[str, object], rate: float) -> None:
    config = parse_config({"model": model})
    assert config.warm_start.rate(config.model) == rate
    assert parse_config({"model": model, "warm_start": {"lr": 0.5}}).warm_start.rate(config.model) == 0.5


def test_each_agent_of_a_demonstration_has_its_own_turns_in_view() -> None:
    turns = [Turn(observation=f"board {number}", fresh=True, actions=[str(number)]) for number in range(4)]
    for turn, agent in zip(turns, "XOOX", strict=True):
        turn.agent_id = agent
    episode = Episode(0, 0, "tic_tac_toe-v1", turns=turns)
    demonstration = Demonstration(episode, Limits(), [True, False, True, True])
    script = ScriptConfig(name="self_play")
    said = list(DemonstrationWriter(WarmStartConfig(), PromptConfig(), tuple("0123"), script)._said(demonstration))
    assert [each.speaker for each in said] == list("XOOX")
    assert [each.observation for each in said] == [turn.observation for turn in turns]
    assert [each.imitate for each in said] == [True, False, True, True]
    assert [[turn.observation for turn in each.past.turns] for each in said] == [[], [], ["board 1"], ["board 0"]]
