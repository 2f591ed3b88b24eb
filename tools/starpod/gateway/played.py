"""An outside agent: its requests for replies and its steps arrive over HTTP and become moves of an episode.

A turn is a reply and the step after it. A reply followed by another reply is a turn without a step. A second step
after the same reply is a turn without token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starpod.client import Observation
from starpod.client import Session as Environment
from starpod.gateway.requests import Rejected
from starpod.gateway.session import Replied, RolloutSession, Sampler
from starpod.trainer.agents.base import Agent, AgentError, AgentRefused, Move, Stop, Task, Tokens, limits_left
from starpod.trainer.data.episode import Episode


@dataclass(eq=False, slots=True)
class StepEvent:
    """Event: the agent requested a step."""

    index: int
    actions: tuple[str, ...]
    result: asyncio.Future[dict[str, Any]]
    """Resolves to the step's result, for the request that waits for it."""


@dataclass(frozen=True, slots=True)
class Left:
    """Event: the agent has ended and makes no further requests."""

    failure: str = ""
    """What went wrong; empty if nothing did."""
    refused: bool = False
    """Whether the same failure would happen in every episode."""


class OutsideAgent(Agent):
    """An agent whose moves in one episode come from an outside program.

    Args:
        key: name of the session, which is also its API key.
        sampler: how replies are sampled.
        stream, order: passed to `Session`.
    """

    # The limit on turns bounds the replies and the steps alike. A further reply is refused, and steps go on: the last
    # one may be what has the work verified.
    replies = 2

    def __init__(
        self, key: str, sampler: Sampler, environment: Environment, task: Task, *, stream: str, order: int
    ) -> None:
        self._environment = environment
        self._task = task
        self._limits = limits_left(environment, environment.step_index)
        self.session = RolloutSession(
            key,
            sampler,
            on_reply=lambda replied: self._events.put_nowait(replied),
            stream=stream,
            order=order,
            most_replies=self._limits.max_turns,
        )
        self._events: asyncio.Queue[Replied | StepEvent | Left] = asyncio.Queue()
        self._episode: Episode | None = None
        self._reply: Replied | None = None
        self._exit: Left | None = None
        self._last: StepEvent | None = None
        self._playing: StepEvent | None = None
        """The step whose move was returned last; later ones may wait among the events."""
        self._over = False

    # --- the episode's side -------------------------------------------------------------------------------------------

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        self._episode = episode
        self._answer_last_step()
        while self._exit is None:
            match await self._events.get():
                case Replied() as replied:
                    reply, self._reply = self._reply, replied
                    if reply is not None:
                        return _make_move(reply, None)
                case StepEvent() as step:
                    self._playing = step
                    reply, self._reply = self._reply, None
                    return _make_move(reply, step.actions)
                case Left() as left:
                    self._exit = left
        if self.session.broken is not None:
            raise self.session.broken
        if self._exit.failure and not self.session.full:
            raise (AgentRefused if self._exit.refused else AgentError)(self._exit.failure)
        if self._reply is not None:
            reply, self._reply = self._reply, None
            return _make_move(reply, None)
        return Stop(self.session.full)

    def close(self) -> None:
        self._over = True
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, StepEvent):  # nobody will play it
                event.result.set_exception(_over(self.session.name))
                event.result.exception()  # mark it as retrieved, in case no request waits any more
        self._answer_last_step()
        self.session.close("its episode is over")

    def _answer_last_step(self) -> None:
        """Send the result of the last step to the request that waits for it."""
        step, self._playing = self._playing, None
        if step is not None and not step.result.done():
            if self._episode is not None and self._episode.failed:
                refusal = Rejected(HTTPStatus.SERVICE_UNAVAILABLE, "environment_lost", self._episode.error)
                step.result.set_exception(refusal)
                step.result.exception()  # mark it as retrieved, in case no request waits any more
            else:
                step.result.set_result(self._describe_result())

    def _describe_result(self) -> dict[str, Any]:
        episode = self._episode
        turn = episode.turns[-1] if episode is not None and episode.turns else None
        facts = {"reward": turn.parts.get("environment", 0.0), "valid": turn.valid} if turn is not None else {}
        return {**facts, **self._describe_state()}

    def _describe_state(self) -> dict[str, Any]:
        environment = self._environment
        return {
            "observation": environment.observation.text,
            "done": environment.done or self._over,
            "step_index": environment.step_index,
        }

    # --- the agent's side ---------------------------------------------------------------------------------------------

    def leave(self, failure: str = "", *, refused: bool = False) -> None:
        """Report that the agent has ended."""
        self._events.put_nowait(Left(failure, refused))

    def observe(self) -> dict[str, Any]:
        """Return the current state and the facts that an agent needs once, such as instructions."""
        limits = self._limits
        return {
            "environment": self._environment.environment_id,
            "instructions": self._environment.instructions,
            "actions": list(self._task.actions),
            "limits": {"turns": limits.max_turns, "actions_per_turn": limits.max_actions_per_turn},
            **self._describe_state(),
        }

    async def step(self, actions: Sequence[str], index: int | None) -> dict[str, Any]:
        """Play one turn.

        Args:
            actions: the actions of the turn.
            index: number of the turn from 0; None: the next one. Repeating the last turn returns the same result.

        Raises:
            Rejected: The turn is out of order, or the episode is over.
        """
        last_step = self._last
        if last_step is not None and index == last_step.index:
            if last_step.actions != tuple(actions):
                raise Rejected(HTTPStatus.CONFLICT, "out_of_order", f"step {index} was played with other actions")
            return await asyncio.shield(last_step.result)
        if last_step is not None and not last_step.result.done():
            raise Rejected(HTTPStatus.CONFLICT, "out_of_order", "the previous step is still being played: wait for it")
        if self._over or self._environment.done:
            raise _over(self.session.name)
        expected = self._environment.step_index
        if index is not None and index != expected:
            raise Rejected(HTTPStatus.CONFLICT, "out_of_order", f"the next step is {expected}, not {index}")
        self._last = StepEvent(expected, tuple(actions), asyncio.get_running_loop().create_future())
        self._events.put_nowait(self._last)
        return await asyncio.shield(self._last.result)


def _over(name: str) -> Rejected:
    return Rejected(HTTPStatus.GONE, "session_over", f"the episode of {name} is over")


def _make_move(replied: Replied | None, actions: Sequence[str] | None) -> Move:
    if replied is None:
        return Move("", actions)
    turn = replied.turn
    tokens = Tokens(turn.prompt, turn.fresh, turn.reply, turn.logprobs, turn.versions, structure=turn.structure)
    return Move(turn.text, actions, turn.thought, True, turn.finish, tokens)
