"""Rewards of turns: the environment's reward plus named parts that are configured.

A shaping function is a plain function of this signature, registered in the entry-point group `starpod.rewards`
(`name = "module:function"`):

    def shape(turn: Turn, transition: Transition | None, view: TurnView, **parameters: Any) -> float

turn: The turn, complete except for its reward.
transition: The environment's answer; None if nothing was sent.
view: The turn and its history: `view.turns` are the attempt's turns up to this one, and `view.previous` is the
    speaker's previous turn in this attempt.
parameters: The configured parameters.

The function returns a finite number of at most MAX_REWARD, which is multiplied by the configured weight. It must not
change its arguments. A YAML file instead of a function is a judge, which scores whole episodes.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from starpod.client import Transition
from starpod.trainer.configuration.section import ConfigError, FilePath, Section
from starpod.trainer.configuration.user_file import UserCodeError, UserFunction, call, expect_callable, load, located
from starpod.trainer.data.episode import Episode, Turn, lines_of
from starpod.trainer.rewards.criteria import CriteriaConfig, score_criteria
from starpod.trainer.rewards.judge import Judge
from starpod.trainer.rewards.subgoals import SubgoalsConfig, is_inconsistent, score_keeping
from starpod.trainer.rewards.tools import ToolsConfig, score_tools
from starpod.trainer.rewards.truth import ReasoningConfig, RelationsConfig
from starpod.trainer.rewards.view import TurnView
from starpod.v1.spelling import nearest
from starpod.v1.values import MAX_REWARD

GROUP = "starpod.rewards"
"""Entry-point group of shaping functions."""

JUDGES = (".yaml", ".yml")
"""Suffixes of the files of judges."""

OWN_PARTS = (
    "environment",
    "format",
    "overlong",
    "reasoning",
    "description",
    "prediction",
    "tools",
    "criteria",
    "keep",
    "consistency",
    "process",
    "verdict",
    "improvement",
    "attempt",
    "opponents",
)


class ShapingConfig(Section):
    """A shaping function or a judge. A number instead of a section sets its weight.

    A key FILE.py:NAME means NAME in that file. A key NAME.yaml is the file of a judge.
    """

    file: FilePath = Field(
        default="", description="File of the function or judge; empty: an installed package registers it."
    )
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Factor of the function's value.")
    parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of the function.")


class RewardConfig(Section):
    """Rewards and penalties in addition to the environment's reward."""

    format_penalty: float = Field(
        default=-0.1,
        le=0,
        allow_inf_nan=False,
        description="Added to a turn with an ill-formed reply or an invalid action; 0: off.",
    )
    overlong_penalty: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="Added to a turn whose reply hit the token limit; 0: off.",
    )
    shaping: dict[str, ShapingConfig] = Field(
        default={}, description="Shaping functions by name, and files of judges: weight, or weight and parameters."
    )
    reasoning: ReasoningConfig = ReasoningConfig()
    relations: RelationsConfig = RelationsConfig()
    tools: ToolsConfig = ToolsConfig()
    criteria: CriteriaConfig = CriteriaConfig()
    verdict: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Paid to a verifier for accepting actions that earn a reward, minus this for others; 0: off.",
    )
    improvement: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Factor of an attempt's gain over the previous one, paid at its end; 0: off.",
    )
    zero_sum: bool = Field(
        default=False, description="Subtracts an agent's environment rewards from the other agents' latest turns."
    )
    subgoals: SubgoalsConfig = SubgoalsConfig()

    @property
    def names(self) -> set[str]:
        """Names of the configured reward parts."""
        amounts = (
            True,
            self.format_penalty,
            self.overlong_penalty,
            self.reasoning.weight,
            self.relations.description,
            self.relations.prediction,
            self.tools.bonus,
            self.criteria.weight,
            self.subgoals.keep_penalty,
            self.subgoals.consistency_penalty,
            False,  # `process` is paid by a turn scorer, which is configured elsewhere
            self.verdict,
            self.improvement,
            False,  # `attempt` is added by scripts with attempts
            self.zero_sum,
        )
        return {name for name, amount in zip(OWN_PARTS, amounts, strict=True) if amount} | set(self.shaping)

    @property
    def shaped(self) -> dict[str, ShapingConfig]:
        """Shaping functions by reward part. Functions with their own configuration keys come first."""
        reasoning, relations = self.reasoning, self.relations
        functions = {
            "reasoning": ShapingConfig(weight=reasoning.weight, parameters={"claims": reasoning.claims}),
            "description": ShapingConfig(weight=relations.description),
            "prediction": ShapingConfig(weight=relations.prediction, parameters={"intended": relations.intended}),
        }
        return {name: shaping for name, shaping in functions.items() if shaping.weight} | self.shaping

    @field_validator("shaping", mode="before")
    @classmethod
    def _weights(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        sections: dict[str, Any] = {}
        for key, value in values.items():
            file, _, name = (located(str(key)) if ":" in str(key) else str(key)).rpartition(":")
            if name.endswith(JUDGES):
                file, name = name, Path(name).stem
            section = {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value
            if file and isinstance(section, Mapping):
                section = {**section, "file": file}
            if name in sections:
                raise ValueError(f"{name} is given twice: rename one of the functions")
            sections[name] = section
        return sections

    @field_validator("shaping")
    @classmethod
    def _free_names(cls, values: dict[str, ShapingConfig]) -> dict[str, ShapingConfig]:
        for name in values:
            if name in OWN_PARTS:
                raise ValueError(f"{name!r} is a part of every reward; register the function under another name")
        return values


class Rewards:
    """Computes the configured rewards of turns.

    Raises ConfigError if a shaping function is not registered, cannot be loaded or does not accept its parameters.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        functions = {name: each for name, each in config.shaped.items() if not each.file.endswith(JUDGES)}
        self._shaping = {name: (_load(name, shaping), shaping.weight) for name, shaping in functions.items()}
        judges = {name: each for name, each in config.shaped.items() if name not in functions}
        self._judges = {name: (Judge(Path(shaping.file)), shaping.weight) for name, shaping in judges.items()}

    def score(self, turn: Turn, transition: Transition | None, episode: Episode) -> dict[str, float]:
        """Return the parts of a turn's reward by name: "environment" and the configured parts.

        Args:
            turn: The turn, with its actions and their outcomes.
            transition: Result of the turn's actions; None if none were sent, which gives no reward of the environment.
            episode: The turns so far, including this one.

        Raises:
            UserCodeError: A shaping function failed.
        """
        config, view = self.config, TurnView.of(turn, episode)
        parts = {"environment": transition.reward if transition is not None else 0.0}
        if config.format_penalty:
            parts["format"] = 0.0 if follows_format(turn, transition) else config.format_penalty
        if config.overlong_penalty:
            parts["overlong"] = config.overlong_penalty if turn.finish == "length" else 0.0
        if config.criteria.weight:
            parts["criteria"] = config.criteria.weight * score_criteria(config.criteria, view)
        if config.subgoals.consistency_penalty:
            parts["consistency"] = config.subgoals.consistency_penalty if is_inconsistent(view) else 0.0
        for name, (function, weight) in self._shaping.items():
            parts[name] = _shape(function, weight, transition, view)
        return parts

    def judge(self, turn: Turn, transition: Transition | None, episode: Episode) -> dict[str, float]:
        """Return the reward parts of a verdict that sent another turn's actions.

        A verdict does not get the actions' reward, but its part "verdict" pays for a right decision.

        Args:
            transition: Result of the other turn's actions; None if none were sent. Its reward decides who was right.
            episode: The turns so far, including this one.

        Raises:
            UserCodeError: A shaping function failed.
        """
        parts = self.score(turn, None, episode)
        if self.config.verdict and transition is not None:
            parts["verdict"] = self.config.verdict * (1.0 if transition.reward > 0 else -1.0)
        return parts

    def without_judges(self) -> Rewards:
        """Return the rewards for evaluations, whose results are the environment's own."""
        rewards = copy.copy(self)
        rewards._judges = {}
        return rewards

    def verdicts(self, episode: Episode) -> dict[str, float]:
        """Return the reward parts of judges, which wait for replies. Raises JudgeFailed and ConfigError."""
        return {name: weight * judge(episode) for name, (judge, weight) in self._judges.items()}

    async def ask_judges(self, episode: Episode) -> None:
        """Pay the last turn of an episode that is over by its judges. Raises JudgeFailed and ConfigError."""
        if self._judges and episode.turns:
            # A checkpoint must take the episode for unfinished while it has no verdict.
            end, episode.end = episode.end, ""
            try:
                parts = await asyncio.to_thread(self.verdicts, episode)
            finally:
                episode.end = end
            episode.turns[-1].pay(parts)

    def reward_improvement(self, before: Sequence[Turn], attempt: Sequence[Turn]) -> None:
        """Reward an attempt for its gain over the previous one, which may be negative (SCoRe's `alpha (r2 - r1)`)."""
        if self.config.improvement and before and attempt:
            gain = _environment_return(attempt) - _environment_return(before)
            attempt[-1].pay({"improvement": self.config.improvement * gain})

    def set_apart(self, attempt: Sequence[Turn], episode: Episode) -> None:
        """Close an attempt that is not the last one.

        The environment's reward becomes the part "attempt", and the episode's end is reset, because only the last
        attempt counts.
        """
        for turn in attempt:
            turn.pay({"attempt": turn.parts["environment"], "environment": 0.0})
        if attempt:
            attempt[-1].info = {**attempt[-1].info, "success": episode.success}
        episode.end, episode.success, episode.tail, episode.tail_fresh = "", None, [], False

    def settle(self, episode: Episode, attempt: int = 0) -> None:
        """Add the reward parts that are known only at the end of an attempt. Repeating this has no effect.

        Turns that the episode shares with its parent are left out, because they belong to the parent.
        """
        config, own_ids = self.config, set(map(id, episode.own_turns))

        def pay(name: str, turns: Sequence[Turn], values: Sequence[float]) -> None:
            for turn, value in zip(turns, values, strict=True):
                if id(turn) in own_ids:
                    turn.pay({name: value})

        turns = [turn for turn in episode.turns if turn.attempt == attempt]
        for line in lines_of(turns):
            if config.subgoals.keep_penalty:
                pay("keep", line, score_keeping(config.subgoals, line))
            if config.tools.bonus:
                pay("tools", line, score_tools(config.tools, line, episode.success))
        if config.zero_sum:
            pay("opponents", turns, _charges(turns))


def _charges(attempt: Sequence[Turn]) -> list[float]:
    """Return the reward part `opponents` of each turn.

    The part is minus the sum of the rewards that other agents earn between this turn and the same agent's next turn.
    An environment rewards only the agent who acts. In a zero-sum game, all other agents lose the same amount.
    """
    charges = [0.0] * len(attempt)
    latest: dict[str, int] = {}
    for index, turn in enumerate(attempt):
        for agent, last_index in latest.items():
            if agent != turn.agent_id:
                charges[last_index] -= turn.parts["environment"]
        latest[turn.agent_id] = index
    return charges


def _environment_return(attempt: Sequence[Turn]) -> float:
    """Return the sum of the environment's rewards in an attempt."""
    return sum(turn.parts.get("attempt", turn.parts["environment"]) for turn in attempt)


def follows_format(turn: Turn, transition: Transition | None) -> bool:
    """Return whether the reply was well-formed and the environment accepted each action as valid.

    Actions that were not executed because of a limit or the episode's end count as valid.
    """
    return turn.well_formed and (transition is None or all(outcome.valid for outcome in transition.outcomes))


def _shape(function: UserFunction, weight: float, transition: Transition | None, view: TurnView) -> float:
    where = f" on turn {len(view.turns)} of {view.environment}, seed {view.seed}"
    value = function(where, view.turn, transition, view)
    is_number = isinstance(value, numbers.Real)
    if not (is_number and abs(value) <= MAX_REWARD):
        raise function.refuse(
            f"failed{where}: it returned {reprlib.repr(value)}, which is not a finite number from -{MAX_REWARD:g} to "
            f"{MAX_REWARD:g}"
        )
    return weight * float(value)


def _load(name: str, shaping: ShapingConfig) -> UserFunction:
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not shaping.file and name not in entries:
        raise ConfigError(
            f"no reward function {name!r} is registered{nearest(name, sorted(entries))} "
            f"(name one of your own as FILE.py:{name}; packages register theirs in the entry-point group {GROUP})"
        )
    label = f"reward function {name!r}"
    if shaping.file:
        function = load(label, f"{shaping.file}:{name}")
    else:
        label += f" of {_origin(entries[name])}"
        try:
            function = expect_callable(label, call(f"{label} cannot be loaded", entries[name].load))
        except UserCodeError as error:
            raise ConfigError(str(error)) from error
    try:
        inspect.signature(function).bind(None, None, None, **shaping.parameters)
    except TypeError as error:
        raise ConfigError(
            f"reward function {name!r} of {shaping.file or _origin(entries[name])} does not take (turn, transition, "
            f"view) and its parameters: {error}"
        ) from error
    return UserFunction(f"reward function {name!r}", functools.partial(function, **shaping.parameters))


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} ({entry.value})" if entry.dist is not None else entry.value
