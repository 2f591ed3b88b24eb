"""Configuration of agents: sampling of replies, conversation scripts, and programs that play."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import CommandWords, Section

SOLVER, VERIFIER = "solver", "verifier"
ATTEMPT = "attempt"
"""Prefix of the agents' names in a script with attempts: attempt1, attempt2 and so on."""


class ScriptConfig(Section):
    """The agents that speak in an episode."""

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["solo", "solver_verifier", "attempts", "self_play"] = Field(
        default="solo",
        description="solo: one agent; solver_verifier: one proposes, one judges; attempts: one tries several times; "
        "self_play: all agents of the environment.",
    )
    proposals: int = Field(
        default=2, ge=2, description="solver_verifier: maximum proposals for a step; the last one is not judged."
    )
    attempts: int = Field(
        default=2, ge=2, description="attempts: number of attempts at a start state; the last one counts."
    )
    solver: str = Field(
        default="You propose actions. Another agent judges each proposal before anything is done.",
        description="Beginning of the solver's system message; not used with style compact.",
    )
    verifier: str = Field(
        default="You judge the actions that another agent proposes: would they help to solve the task?",
        description="Beginning of the verifier's system message; not used with style compact.",
    )
    policies: tuple[str, ...] = Field(
        default=(),
        description="solver_verifier, self_play: names of the agents, one policy each; empty: all share one.",
    )
    again: str = Field(
        default="There may be mistakes in what you did. Look for them, and try once more from the start.",
        description="attempts: message before each further attempt. With style compact it is `Again.`.",
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
                f"script.policies needs agents with separate contexts, but script {self.name} has one context: set "
                "script.name to solver_verifier or self_play, or drop script.policies"
            )
        if self.name == "solver_verifier" and distinct != {SOLVER, VERIFIER}:
            raise ValueError(f"script.policies {list(names)}: the agents of solver_verifier are [{SOLVER}, {VERIFIER}]")
        if len(distinct) < max(len(names), 2):
            raise ValueError(f"script.policies {list(names)}: name at least two agents, each once")
        if bad_name := next((name for name in names if not re.fullmatch(r"[\w-]+", name)), None):
            raise ValueError(
                f"script.policies names {bad_name!r}, which cannot be part of a metric's name: use letters, digits, "
                "_, -"
            )
        return self

    @property
    def parts(self) -> set[str]:
        """Names of the reward parts that the script adds."""
        return {ATTEMPT} if self.name == "attempts" else set()


class SamplingConfig(Section):
    """Sampling of replies, and limits on their length and their context."""

    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; also applied in training.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the probability from which tokens are sampled. Training accepts only 1.",
    )
    max_reply_tokens: int = Field(default=400, ge=1, description="Maximum tokens of a reply, including its end token.")
    min_reply_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that must be left for a reply. If fewer are left, a window drops turns, and without a "
        "window the episode ends; null: half of sampling.max_reply_tokens.",
    )
    max_episode_tokens: int = Field(default=3600, ge=2, description="Maximum tokens of prompt and reply together.")
    stop: tuple[str, ...] = Field(default=(), description="Texts that end a reply, and are its end.")
    json_schema: dict[str, Any] | None = Field(
        default=None,
        description="JSON schema of a reply's answer. Only tokens that fit are sampled, and training scores them "
        "among these alone. Needs the extra `structured`; null: any answer.",
    )

    @model_validator(mode="after")
    def _whole_distribution(self) -> SamplingConfig:
        if self.top_p < 1:
            raise ValueError(
                "sampling.top_p below 1 samples from another distribution than the trained one; leave it at 1"
            )
        return self

    @model_validator(mode="after")
    def _replies_fit(self) -> SamplingConfig:
        if self.least_room > self.max_reply_tokens:
            raise ValueError(
                f"sampling.min_reply_tokens {self.least_room} is more than max_reply_tokens {self.max_reply_tokens}: "
                "a reply would need more free tokens than it may use"
            )
        if self.least_room >= self.max_episode_tokens:
            raise ValueError(
                f"sampling.max_episode_tokens {self.max_episode_tokens} leaves no token for a prompt, because a "
                f"reply needs {self.least_room}: raise it, or lower sampling.min_reply_tokens"
            )
        return self

    @property
    def least_room(self) -> int:
        """Minimum number of tokens that must be left for a reply."""
        return self.min_reply_tokens or max(min(self.max_reply_tokens, self.max_episode_tokens) // 2, 1)


class ProgramConfig(Section):
    """A program that plays with the policy as its model. It is off if `command` is empty."""

    command: CommandWords = Field(
        default=(),
        description="Program of yours that plays an episode, and its arguments. It is started once per episode, "
        "and finds the policy at OPENAI_BASE_URL as an OpenAI-compatible model. Empty: the trainer "
        "plays.",
    )
    at_once: int = Field(default=16, ge=1, description="Maximum programs at a time; other episodes wait.")
    port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="Port of the gateway at 127.0.0.1, for programs in containers that may reach it: "
        "harbor:FOLDER#reach=127.0.0.1:PORT. 0: a free one.",
    )
