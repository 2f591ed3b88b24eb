"""New rewards for recorded episodes, without playing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

from pydantic import ValidationError

from starpod.client import EndReason, Transition
from starpod.trainer.configuration.layers import read_values
from starpod.trainer.configuration.mistakes import explain
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode, Turn, part_sums
from starpod.trainer.evaluation.figures import summarise_outcomes
from starpod.trainer.rewards.reward import JUDGES, RewardConfig, Rewards


class NeedsEnvironment(Exception):
    """A reward reads something that only the environment knows and no episode records."""


class RecordedPart(SimpleNamespace):
    """A transition or an observation as an episode records it. Reading anything else raises NeedsEnvironment."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NeedsEnvironment(f"it reads {name}, which episodes do not record: the reward needs the live environment")


def find_rewards(word: str) -> RewardConfig:
    """Return what a word of `--reward` names: FILE.py:NAME, a registered function, a judge, or a file of `rewards`.

    Raises ConfigError.
    """
    values: dict[str, Any] = {"shaping": {word: 1.0}}
    try:
        if word.endswith(JUDGES) and "rubric" not in (file_values := read_values(Path(word))):
            values = file_values
        config = RewardConfig.model_validate({"format_penalty": 0.0, **values})
    except FileNotFoundError:
        raise ConfigError(f"there is no file {word}") from None
    except ValidationError as error:
        raise ConfigError(f"{word}: {explain(RewardConfig, error)}") from None
    if unknown := [name for name in ("verdict", "improvement", "zero_sum") if getattr(config, name)]:
        raise ConfigError(f"{word}: episodes do not record what rewards.{unknown[0]} needs; leave it out")
    return config


def score_again(rewards: Rewards, episode: Episode) -> dict[str, float]:
    """Return the sums of the reward parts over the last attempt, without the environment's own and those of judges.

    Raises:
        ConfigError: A function needs the live environment.
        UserCodeError: A function failed.
    """
    turns = [turn for turn in episode.turns if turn.attempt == episode.turns[-1].attempt]
    again = replace(episode, turns=[], end="", success=None, parent=None)
    observations = [*(turn.observation for turn in turns[1:]), episode.final_observation]
    is_scripted = len({turn.agent_id for turn in turns}) > 1  # a speaker may have sent nothing
    for turn, observation in zip(turns, observations, strict=True):
        again.turns.append(replace(turn, parts={}))
        if len(again.turns) == len(turns):
            again.end, again.success = episode.end, episode.success
        transition = _transition(turn, observation, again) if turn.outcomes or not is_scripted else None
        try:
            again.turns[-1].pay(rewards.score(again.turns[-1], transition, again))
        except UserCodeError as error:
            if isinstance(error.__cause__, NeedsEnvironment):
                raise ConfigError(f"episodes cannot be scored again: {error}") from error
            raise
    rewards.settle(again, turns[-1].attempt)
    return {name: value for name, value in part_sums(again.turns).items() if name != "environment"}


def _transition(turn: Turn, observation: str, episode: Episode) -> Transition:
    end = EndReason.__members__.get(episode.end.upper(), EndReason.NONE)
    record = RecordedPart(
        observation=RecordedPart(text=observation),
        reward=turn.own_reward,
        reward_parts=turn.info.get("reward_parts", {}),
        outcomes=tuple(RecordedPart(**outcome._asdict()) for outcome in turn.outcomes),
        actions=tuple(turn.actions),
        criteria=turn.criteria,
        info=turn.info,
        success=episode.success,
        end_reason=end,
        done=bool(episode.end),
        terminated=end == EndReason.TERMINAL,
        truncated=bool(episode.end) and end != EndReason.TERMINAL,
    )
    return cast(Transition, record)


def compare_rewards(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return metrics of each model and environment: `before` and `after` are those of `summarise_outcomes`.

    `changed` is the number of episodes with another reward, `agreement` the share with the same success, where unknown
    success counts as none, and `unscored` the number of episodes without a new reward.
    """
    report = []
    for model, environment in dict.fromkeys((row["model"], row["environment"]) for row in rows):
        members = [row for row in rows if (row["model"], row["environment"]) == (model, environment)]
        scored = [row for row in members if "error" not in row]
        figures: dict[str, Any] = {"model": model, "environment": environment, "unscored": len(members) - len(scored)}
        for name, side in (("before", "old_"), ("after", "")):
            figures[name] = summarise_outcomes(
                (row["seed"], row[f"{side}success"], row[f"{side}reward"]) for row in scored
            )
        figures["changed"] = sum(row["reward"] != row["old_reward"] for row in scored)
        agreements = [row["success"] == bool(row["old_success"]) for row in scored]
        report.append({**figures, "agreement": fmean(agreements) if scored else None})
    return report
