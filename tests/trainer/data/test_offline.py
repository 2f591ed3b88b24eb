"""Files to train on: what would teach nothing, something else, or what is held out, is refused."""

from pathlib import Path
from typing import Any

import pytest

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import write_episodes
from starpod.trainer.data.offline import check_tokens, read_offline
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.template import Template
from tests.trainer.turns import a_turn

TEXTS = ["<think>Left Down</think><answer>Left</answer>", "Right Right"]


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(train_tokenizer(TEXTS, size=400), prefill="<think>")


def sampled(template: Template, *, seed: int = 10_000, tokens: bool = True) -> list[Episode]:
    reply = template.encode_reply("<think>Left</think><answer>Left</answer>")
    text, ids = template.decode(reply), reply if tokens else []
    turn = a_turn(ids, text=text)
    return [Episode(0, member, "lake", seed=seed, turns=[turn], end="terminal") for member in range(2)]


def read(path: Path, episodes: list[Episode], template: Template) -> int:
    write_episodes(path / "played.jsonl", episodes)
    groups = read_offline(str(path / "played.jsonl"), SeedsConfig())
    check_tokens("played.jsonl", groups, {"": template})
    return len(groups)


def test_what_the_policys_own_tokenizer_reads_is_trained_on(tmp_path: Path, template: Template) -> None:
    assert read(tmp_path, sampled(template), template) == 1
    assert read_offline("", SeedsConfig()) == []


def test_tokens_of_another_tokenizer_or_prompt_are_refused(tmp_path: Path, template: Template) -> None:
    for other in (
        Template(train_tokenizer([text.upper() for text in TEXTS], size=330), prefill="<think>"),
        Template(template.tokenizer, prefill="<answer>"),
    ):
        with pytest.raises(ConfigError, match="another tokenizer or prompt"):
            read(tmp_path, sampled(template), other)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": False}, "has no sampled tokens"),
        ({"seed": 9999}, r"seed 9999, which seeds\.selection \(5000 to 9999\) holds out"),
        ({"seed": 0}, r"seed 0, which seeds\.final \(0 to 4999\) holds out"),
    ],
)
def test_what_teaches_nothing_or_is_held_out_is_refused(
    tmp_path: Path, template: Template, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, sampled(template, **given), template)


def test_a_file_that_is_not_there_is_a_wrong_configuration() -> None:
    with pytest.raises(ConfigError, match=r"replay\.offline: .* does not exist"):
        read_offline("/absent/played.jsonl", SeedsConfig())
