"""Demonstrations written down as replies."""

import pytest

from starpod.trainer.config import parse_config
from starpod.trainer.data.episode import Turn
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.section import ConfigError
from starpod.trainer.warmstart import DemonstrationWriter, WarmStartConfig

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
