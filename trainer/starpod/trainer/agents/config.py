"""Configuration of agents: sampling of replies, conversation scripts, and programs that play."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.section import Section

SOLVER, VERIFIER = "solver", "verifier"
ATTEMPT = "attempt"
"""Prefix of the agents' names in a script with attempts: attempt1, attempt2 and so on."""


class ScriptConfig(Section):
    """The agents that speak in an episode."""

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["solo", "solver_verifier", "attempts", "self_play"] = Field(
        default="solo",
        description="One agent; two, of whom one proposes and one judges; one that tries several times; all agents of "
        "an environment that has several.",
    )
    proposals: int = Field(
        default=2, ge=2, description="Proposals for a step at most; the last is not judged (solver_verifier)."
    )
    attempts: int = Field(default=2, ge=2, description="Attempts at the same start state; the last counts (attempts).")
    solver: str = Field(
        default="You propose actions. Another agent judges each proposal before anything is done.",
        description="Beginning of the solver's system message; not in style compact.",
    )
    verifier: str = Field(
        default="You judge the actions that another agent proposes: would they help to solve the task?",
        description="Likewise of the verifier's.",
    )
    policies: tuple[str, ...] = Field(
        default=(),
        description="Agents that have a policy each, by name (solver_verifier, self_play); empty: all share one.",
    )
    again: str = Field(
        default="There may be mistakes in what you did. Look for them, and try once more from the start.",
        description="Told before each further attempt; `Again.` in style compact.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ScriptConfig:
        for key, name in (("proposals", "solver_verifier"), ("attempts", "attempts")):
            if self.name != name and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"script.{key} belongs to {name}, and script.name is {self.name}: drop it")
        return self

    @model_validator(mode="after")
    def _policies_are_told_apart(self) -> ScriptConfig:
        names, distinct = self.policies, set(self.policies)
        if not names:
            return self
        if self.name not in ("solver_verifier", "self_play"):
            raise ValueError(
                f"script.policies are of agents with contexts of their own, and in script {self.name} there is one "
                "context: set script.name to solver_verifier or self_play, or drop script.policies"
            )
        if self.name == "solver_verifier" and distinct != {SOLVER, VERIFIER}:
            raise ValueError(f"script.policies {list(names)}: the agents of solver_verifier are [{SOLVER}, {VERIFIER}]")
        if len(distinct) < max(len(names), 2):
            raise ValueError(f"script.policies {list(names)}: name at least two agents, each once")
        if bad_name := next((name for name in names if not re.fullmatch(r"[\w-]+", name)), None):
            raise ValueError(
                f"script.policies names {bad_name!r}, which cannot stand in metrics: use letters, digits, _, -"
            )
        return self

    @property
    def parts(self) -> set[str]:
        """Names of the reward parts that the script adds."""
        return {ATTEMPT} if self.name == "attempts" else set()


class SamplingConfig(Section):
    """Sampling of replies, and limits on their length and their context."""

    temperature: float = Field(default=1.0, gt=0, description="Divides the logits, in sampling and in training.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Nucleus sampling; below 1 refused in training.",
    )
    max_reply_tokens: int = Field(default=400, ge=1, description="Tokens of a reply, with its end token.")
    min_reply_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Room that a reply is given at least: a window shows fewer turns for it, else the episode ends; "
        "null: half of max_reply_tokens.",
    )
    max_episode_tokens: int = Field(default=3600, ge=2, description="Tokens of a whole context.")

    @model_validator(mode="after")
    def _whole_distribution(self) -> SamplingConfig:
        if self.top_p < 1:
            raise ValueError(
                "sampling.top_p below 1 samples from another distribution than the one that is trained; leave it at 1"
            )
        return self

    @model_validator(mode="after")
    def _replies_fit(self) -> SamplingConfig:
        if self.least_room > self.max_reply_tokens:
            raise ValueError(
                f"sampling.min_reply_tokens {self.least_room} is more than max_reply_tokens {self.max_reply_tokens}: "
                "no reply may be as long as the room that it must have"
            )
        if self.least_room >= self.max_episode_tokens:
            raise ValueError(
                f"sampling.max_episode_tokens {self.max_episode_tokens} leaves no token for a prompt beside a reply's "
                f"least room of {self.least_room}: raise it, or lower sampling.min_reply_tokens"
            )
        return self

    @property
    def least_room(self) -> int:
        """Minimum number of tokens that must be left for a reply."""
        return self.min_reply_tokens or max(min(self.max_reply_tokens, self.max_episode_tokens) // 2, 1)


class ProgramConfig(Section):
    """A program that plays with the policy as its model. It is off if `command` is empty."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Program and arguments, started for each episode with the policy behind OPENAI_BASE_URL; see "
        "docs/gateway.md#training. Empty: the policy plays by the trainer's own prompts.",
    )
    at_once: int = Field(default=16, ge=1, description="Programs at the same time; the other episodes wait.")
