"""Interface of agents, which play one episode each, and of their factories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from starpod.client import (
    Action,
    EpisodePath,
    Fleet,
    Limits,
    Observation,
    Opening,
    PathTurn,
    Reseeding,
    Session,
    Snapshot,
    Want,
)
from starpod.trainer.data.episode import End, Episode, Finish, Turn


class AgentError(Exception):
    """The agent's infrastructure failed. Its episode fails and the other episodes continue."""


class AgentRefused(Exception):
    """The agent can never reply, for example because its key is wrong. The message says how to fix that."""


@dataclass(frozen=True, slots=True)
class Task:
    """An environment to play. `environment`, `version`, `options` and `limits` are arguments of `Fleet.open`."""

    environment: str
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    actions: tuple[str, ...] = ()
    """The environment's action names, if they are fixed."""
    name: str = ""
    """Key in the run's `environments`; "" if the run has only one environment."""
    expert_moves_left: int | None = None
    """Number of moves that the expert needs to the goal when a collected episode begins; None: the start state."""

    def with_options(self, options: Mapping[str, Any]) -> Task:
        """Return a copy with these options merged over the existing ones."""
        return replace(self, options={**self.options, **options}) if options else self

    def with_defaults(self, defaults: Task) -> Task:
        """Return a copy whose unset options, limits and version are those of another task, as is its name."""
        limit_values = {name: value for name, value in asdict(self.limits).items() if value is not None}
        limits = replace(defaults.limits, **limit_values)
        options = {**defaults.options, **self.options}
        return Task(self.environment, self.version or defaults.version, options, limits, self.actions, defaults.name)

    async def open(self, fleet: Fleet, seed: int, count: int, want: Want) -> list[Session]:
        """Open a group of sessions with the task's options and limits."""
        return await fleet.open(
            self.environment,
            seed=seed,
            count=count,
            options=self.options or None,
            want=want,
            limits=self.limits,
            version=self.version,
        )

    def path(
        self,
        episode: Episode,
        *,
        dynamics_seed: int | None = None,
        reseedings: Mapping[int, Reseeding] | None = None,
        snapshots: Mapping[int, Snapshot] | None = None,
    ) -> EpisodePath:
        """Return the path of an episode of this task.

        Args:
            dynamics_seed: seed of the random transitions from the start; None is the record's.
            reseedings: the reseedings, by the index of the turn after them.
            snapshots: snapshots of the states before turns, by the turn's index.
        """
        origin = Opening(
            self.environment,
            episode.seed,
            episode.dynamics_seed if dynamics_seed is None else dynamics_seed,
            self.options or None,
            self.limits,
            f"=={episode.version}" if episode.version else self.version,
        )
        reseedings, snapshots = reseedings or {}, snapshots or {}
        events: list[PathTurn | Reseeding] = []
        for number in range(len(episode.turns) + 1):
            if number in reseedings:
                events.append(reseedings[number])
            if number < len(episode.turns):
                turn = episode.turns[number]
                events.append(PathTurn(turn.actions, turn.observation, snapshots.get(number)))
        return EpisodePath(origin, events, episode.final_observation or None)


def extend_limits(limits: Limits, turns: int) -> Limits:
    """Return limits that allow `turns` more turns of one action each. A limit of 0 (no limit) stays 0."""
    raised_limits = [limit + turns if limit else 0 for limit in (limits.max_turns, limits.max_actions)]
    return Limits(raised_limits[0], limits.max_actions_per_turn, raised_limits[1])


def limits_left(session: Session, begun_at: int) -> Limits:
    """Return the session's limits minus the turns that were played before the episode began (`Episode.begun_at`)."""
    return extend_limits(session.limits, -begun_at)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. None means the value of the policy's training run, or the default if there is no run."""

    temperature: float | None = None
    """Temperature of the softmax; 0 is greedy."""
    max_tokens: int | None = None
    """Maximum number of tokens in a reply."""
    thinking: bool | None = None
    """Whether a reply begins with reasoning."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a move that an engine sampled. The fields `prompt`, `fresh`, `reply`, `logprobs`, `versions`,
    `spans`, `hinted` and `structure` are those of `Turn`."""

    prompt: list[int]
    fresh: bool
    reply: list[int]
    logprobs: list[float]
    versions: list[int]
    spans: list[tuple[str, int]] = field(default_factory=list)
    hinted: list[int] = field(default_factory=list)
    structure: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """One reply of an agent. `thought`, `well_formed`, `finish` and `blocks` are those of `Turn`."""

    text: str
    """The reply."""
    actions: Sequence[Action] | None
    """Sub-actions to send in one step, in order. An empty list sends a step without an action, which costs a turn in
    the environment. None sends nothing, and only the trainer counts the turn."""
    thought: str | None = None
    well_formed: bool = True
    finish: Finish = "stop"
    tokens: Tokens | None = None
    """The sampled tokens; None if no engine of the trainer sampled the reply."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    agent_id: str = ""
    """Name of the speaker if several agents share the episode; "" is the agent whose turn it is in the environment."""
    of: int = 0
    """0 if these actions belong to this reply, 1 if they belong to the previous one (a verifier accepting a proposal).
    Reward and observation are recorded on that turn."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent makes no further move."""

    end: End = ""
    """Reason why the episode ends; "" if the agent knows no move."""


class Agent(ABC):
    """Player of one episode. It answers each observation with a move."""

    attempts: int = 1
    """Number of attempts at the start state. All but the last one are played on forks."""
    replies: int = 1
    """Maximum number of moves per turn of the environment."""

    @abstractmethod
    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        """Return the next move.

        Args:
            observation: The current observation.
            episode: The previous turns and their results.

        Raises:
            AgentError: If the episode fails.
            AgentRefused: If the agent can never reply.
        """

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        """Return a recorded turn's move as if it were made now; None if its reply does not fit the prompt.

        Args:
            episode: The turns before the recorded one.
        """
        return None

    def recall(self, episode: Episode) -> None:
        """Adopt the turns of an episode that another agent played, in order to continue it."""
        return

    def image_of(self, observation: Observation) -> bytes:
        """Return the observation's image as this agent sees it; empty if it sees only text. Raises AgentError."""
        return b""

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        """Return the prompt whose reply a limit prevented: the values of `Episode.tail` and `tail_fresh`."""
        return [], False

    def begin_attempt(self, number: int) -> None:
        """Prepare for attempt `number`, counted from 0. Called before each attempt."""
        return

    def close(self) -> None:
        """Release the agent's resources. Called once when the episode is over."""
        return


class Agents(ABC):
    """Factory of the agents of episodes."""

    want: Want
    """Parts of observations that the agents need."""
    at_once: int | None
    """Maximum number of agents that play at the same time; None is no limit."""

    @abstractmethod
    def agent(self, session: Session, task: Task, group: int) -> Agent:
        """Return the agent for a new episode."""

    async def close(self) -> None:
        """Release the agents' resources."""
        return
