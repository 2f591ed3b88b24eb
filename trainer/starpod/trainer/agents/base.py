"""Interface of agents, which play one episode each, and of their factories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starpod.client import Fleet, Limits, Observation, Session, Want
from starpod.trainer.data.episode import End, Episode, Finish, Turn


class AgentError(Exception):
    """The agent gave no reply, through no fault of its own: the episode is failed, and the others go on."""


class AgentRefused(Exception):
    """The agent will never give a reply: the key is wrong, or there is no such model. The message says the remedy."""


@dataclass(frozen=True, slots=True)
class Task:
    """An environment to be played.

    environment, version, options, limits: as `Fleet.open` takes them. actions: its action names, if they are fixed.
    name: among the run's `environments`; empty where the run has one. expert_moves_left: moves of the environment's
    expert that are left when a collected episode begins; None: all.
    """

    environment: str
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    actions: tuple[str, ...] = ()
    name: str = ""
    expert_moves_left: int | None = None

    def with_options(self, options: Mapping[str, Any]) -> Task:
        """The same, with these options over its own."""
        return replace(self, options={**self.options, **options}) if options else self

    async def open(self, fleet: Fleet, seed: int, count: int, want: Want) -> list[Session]:
        """A group of `count` sessions that share the start state of `seed`. Raises as `Fleet.open` does."""
        return await fleet.open(
            self.environment,
            seed=seed,
            count=count,
            options=self.options or None,
            want=want,
            limits=self.limits,
            version=self.version,
        )


def longer(limits: Limits, turns: int) -> Limits:
    """The limits of an episode with so many more turns of one action each; 0 stays no limit."""
    most = [limit + turns if limit else 0 for limit in (limits.max_turns, limits.max_actions)]
    return Limits(most[0], limits.max_actions_per_turn, most[1])


def limits_left(session: Session) -> Limits:
    """The limits of what an agent is about to play: the turns before are those of an expert."""
    return longer(session.limits, -session.step_index) if session.step_index else session.limits


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of replies. None: as the run that trained the policy does it, or as is usual where there is none."""

    temperature: float | None = None
    max_tokens: int | None = None
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a move that an engine sampled; fields as in `Turn`."""

    prompt: list[int]
    fresh: bool
    reply: list[int]
    logprobs: list[float]
    versions: list[int]
    spans: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Move:
    """One reply of an agent.

    text: the reply. actions: what is sent in one step, in order. Empty: a step without an action, which costs a turn
    there. None: nothing is sent, and the turn counts here alone. thought, blocks, well_formed, finish: as in `Turn`.
    tokens: how the reply was sampled; None where no engine of the trainer sampled it. agent_id: of several that share
    the episode; empty: the one whose turn it is in the environment. of: how many turns back the reply is whose actions
    these are: that turn takes what comes of them.
    """

    text: str
    actions: Sequence[str] | None
    thought: str | None = None
    well_formed: bool = True
    finish: Finish = "stop"
    tokens: Tokens | None = None
    blocks: Mapping[str, str] = field(default_factory=dict)
    agent_id: str = ""
    of: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent makes no further move. end: the episode's end; empty: the agent knows no move."""

    end: End = ""


class Agent(ABC):
    """Plays one episode: answers each observation with a move.

    attempts: how often it plays the start state; all but the last time on forks. replies: moves for a turn of the
    environment at most.
    """

    attempts: int = 1
    replies: int = 1

    @abstractmethod
    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        """The next move. observation: what the environment shows now. episode: the turns before it, with their results.

        Raises AgentError and AgentRefused.
        """

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        """The move of a turn that was played before, as if it were made now; None where it would not be the same."""
        return None

    def recall(self, episode: Episode) -> None:
        """Takes the turns of an episode that another agent played for its own, to go on after them."""
        return

    def image_of(self, observation: Observation) -> bytes:
        """The observation's image as it is shown to this agent; empty where it reads text. Raises AgentError."""
        return b""

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        """`Episode.tail` and `tail_fresh`: the prompt of the reply that a limit prevented. Empty without tokens."""
        return [], False

    def begin_attempt(self, number: int) -> None:
        """Called before each attempt, from 0."""
        return

    def close(self) -> None:
        """Called once when the episode is over."""
        return


class Agents(ABC):
    """Makes the agent of each episode.

    want: what observations have to carry for them. at_once: how many may play at a time; None: any number.
    """

    want: Want
    at_once: int | None

    @abstractmethod
    def agent(self, session: Session, task: Task, group: int) -> Agent:
        """The agent of the episode that `session` is about to play, as a member of `group`."""

    def fit(self, task: Task) -> Task:
        """The task with whatever it leaves open as these agents were trained on it."""
        return task

    def facts(self) -> dict[str, Any]:
        """JSON values to report beside what they came to."""
        return {}

    async def close(self) -> None:
        """Releases the agents' resources."""
        return
