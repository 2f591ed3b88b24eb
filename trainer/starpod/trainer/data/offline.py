"""Recorded episodes to train on instead of collecting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.data.episode import EXTERNAL
from starpod.trainer.data.files import BadEpisodes, read_groups
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.prompts.template import Template


def read_offline(path: str, seeds: SeedsConfig) -> list[Group]:
    """Return the groups in the files of `replay.offline`.

    Args:
        path: A file or folder of episodes; "" means none.

    Raises:
        ConfigError: Files cannot be used, contain no sampled token, or begin in held-out start states.
    """
    if not path:
        return []
    try:
        groups = read_groups(path)
    except BadEpisodes as error:
        raise ConfigError(f"replay.offline: {error}") from error
    episodes = episodes_of(groups)
    if not episodes:
        raise ConfigError(
            f"replay.offline {path} has no sampled tokens to train on: record episodes of a run, a checkpoint or a "
            "Hugging Face model; those of other policies have no tokens"
        )
    for episode in episodes:
        holder = "" if episode.environment == EXTERNAL else seeds.holds_out(episode.seed)
        if holder:
            raise ConfigError(
                f"replay.offline {path} holds an episode of seed {episode.seed}, which {holder} holds out: record "
                f"others with `starpod eval --seed {seeds.train.start}`, or choose other {holder.split()[0]}"
            )
    return groups


def check_tokens(path: str, groups: Sequence[Group], templates: Mapping[str, Template]) -> None:
    """Raise ConfigError for groups that were sampled with another tokenizer, which does not decode to their texts."""
    for episode in episodes_of(groups):
        template = templates.get(episode.task) or next(iter(templates.values()))
        for number, turn in enumerate(episode.turns, 1):
            # Compare only the end, because the beginning may be prefilled, for example in a tool call.
            if turn.reply and not turn.text.endswith(text := template.decode(turn.reply)):
                raise ConfigError(
                    f"replay.offline {path} was sampled with another tokenizer or prompt: the tokens of turn {number} "
                    f"of an episode of seed {episode.seed} read {text[:40]!r} here and not {turn.text[:40]!r}; train "
                    "the model that sampled it, with its `prompt`"
                )
