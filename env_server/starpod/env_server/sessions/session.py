"""One session: its position in the episode, the queue of its calls, and the last reply."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence

from google.protobuf.message import Message

from starpod.env_server.authoring.environment import Environment, derive_seed
from starpod.env_server.episodes.convert import copy_observation, fill_limits
from starpod.env_server.episodes.errors import CallError
from starpod.env_server.episodes.live_episode import ObservedState, TurnResult
from starpod.env_server.processes.hosts import EpisodeHost, ResetPlan, Started
from starpod.v1 import environment_pb2 as pb

SHORT_TEXT = 1_024
"""Actions with at most this many characters are kept as text. Longer ones are kept as a digest."""
_SHORT_BYTES = 64


class ServedSession:
    """One live session. `async with session:` takes a turn of its calls.

    Attributes:
        plan: seeds, options and limits of the current episode.
        want: the plan's Want, which every step reads.
        epoch: epoch that the next Step must carry.
        next_index: step index that the next Step must carry.
        over: whether the episode has ended.
        last_request: the latest turn, or the latest Reset if no turn followed. It is stored as a digest, or as the
            actions if these are short texts, or as the seeds of a Reset that changes nothing else.
        last_reply: the reply to `last_request`, for a caller that did not receive it. A small reply is stored as a
            Transition or Started, any other as the serialized message.
        lost: why the session can no longer be used; empty if it can.
        closed: whether it has been removed from its table.
        last_call: monotonic time of the latest call, in seconds.
        lease: seconds after `last_call` at which the session expires.
        pending: number of calls that wait or run. The session is not reaped and further calls queue while it is not 0.
    """

    __slots__ = (
        "_turn",
        "closed",
        "environment",
        "epoch",
        "host",
        "id",
        "last_call",
        "last_reply",
        "last_request",
        "lease",
        "lost",
        "member",
        "next_index",
        "over",
        "pending",
        "plan",
        "want",
    )

    def __init__(
        self,
        environment: type[Environment],
        host: EpisodeHost,
        plan: ResetPlan,
        lease: float,
        member: int,
        turns: int = 0,
        over: bool = False,
    ) -> None:
        self.id = secrets.token_urlsafe(16)
        self.environment = environment
        self.host = host
        self.plan = plan
        self.want = plan.want
        self.lease = lease
        self.member = member
        self.epoch = 1
        self.next_index = turns
        self.over = over
        self.last_request: tuple[str, ...] | tuple[int | None, int | None] | bytes | None = None
        self.last_reply: TurnResult | Started | bytes | None = None
        self.lost = ""
        self.closed = False
        self.last_call = time.monotonic()
        self.pending = 0
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> None:
        """Begin a call on this session. Calls run one at a time, in the order of arrival."""
        self.pending += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self.pending -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self.last_call = time.monotonic()
        self.pending -= 1
        self._turn.release()

    def check(self) -> None:
        """Raise SESSION_LOST if the session can no longer be used, or UNKNOWN_SESSION if it was closed."""
        if self.closed or self.lost:
            raise self.loss()

    def loss(self) -> CallError:
        """Return the error of calls on a session that was closed or lost."""
        if self.closed:
            return unknown_session(self.id)
        return CallError("SESSION_LOST", f"the session is gone: {self.lost}; open a new one", {"cause": self.lost})

    def earlier_reply(
        self, epoch: int, index: int, actions: Sequence[pb.Action | str]
    ) -> TurnResult | pb.Transition | None:
        """Return the last reply if this repeats the last turn, or None if this is the next turn.

        Args:
            actions: actions of the request. A repeated turn must have equal ones.

        Raises:
            CallError: SESSION_LOST, UNKNOWN_SESSION, EPISODE_OVER or OUT_OF_ORDER.
        """
        self.check()
        if epoch == self.epoch:
            if index == self.next_index and not self.over:
                return None
            reply = self.last_reply
            if index == self.next_index - 1 and reply is not None and digest_actions(actions) == self.last_request:
                assert not isinstance(reply, Started)  # a turn followed
                return reply if isinstance(reply, TurnResult) else pb.Transition.FromString(reply)
        raise self.out_of_order(epoch, index)

    def earlier_reset(self, request: pb.ResetRequest) -> pb.ResetResponse | None:
        """Return the last reply if this repeats the last Reset, or None if this resets the current episode.

        Raises:
            CallError: SESSION_LOST, UNKNOWN_SESSION or OUT_OF_ORDER.
        """
        self.check()
        if request.epoch == self.epoch:
            return None
        is_repeat = request.epoch == self.epoch - 1 and self.next_index == 0
        reply = self.last_reply
        if is_repeat and isinstance(reply, bytes | Started) and self.last_request == digest_reset(request):
            return self.reset_response(reply) if isinstance(reply, Started) else pb.ResetResponse.FromString(reply)
        raise self.out_of_order(request.epoch, self.next_index)

    def plan_episode(self, seed: int | None, dynamics_seed: int | None) -> ResetPlan:
        """Return the plan of a new episode. A seed of None is drawn, and a dynamics seed of None is derived."""
        if seed is None:
            seed = secrets.randbits(48)
        if dynamics_seed is None:
            dynamics_seed = derive_seed(seed, "member", self.member)
        return ResetPlan(self.plan.options, self.plan.limits, seed, dynamics_seed, self.want)

    def begin_episode(self, plan: ResetPlan) -> None:
        """Update the session for a new episode that its host has started."""
        self.plan, self.want = plan, plan.want
        self.epoch += 1
        self.next_index = 0
        self.over = False

    def reset_response(self, started: Started) -> pb.ResetResponse:
        """Return the reply to the Reset that started the current episode, of which no turn was played."""
        response = pb.ResetResponse(instructions=started.instructions)
        self.describe(response.session, started.observation)
        fill_limits(response.limits, self.plan.limits)
        return response

    def keep_turn(self, actions: Sequence[pb.Action | str], transition: TurnResult | pb.Transition) -> None:
        """Update the session for a turn that was executed, and keep the reply for a repeated call."""
        self.next_index += 1
        self.over = bool(transition.end_reason)
        self.last_request = digest_actions(actions)
        self.last_reply = transition if isinstance(transition, TurnResult) else transition.SerializeToString()

    def out_of_order(self, epoch: int, index: int) -> CallError:
        """Return EPISODE_OVER if the numbers are those of the next turn, else OUT_OF_ORDER with the expected ones."""
        numbers = {"expected_epoch": str(self.epoch), "expected_step_index": str(self.next_index)}
        if (epoch, index) == (self.epoch, self.next_index):
            return CallError("EPISODE_OVER", "the episode is over; reset the session first", numbers)
        if (epoch, index) == (self.epoch, self.next_index - 1):
            problem = f"step {index} was already played with other actions"
        else:
            problem = f"got epoch {epoch}, step {index}"
        return CallError("OUT_OF_ORDER", f"{problem}; expected epoch {self.epoch}, step {self.next_index}", numbers)

    def describe(self, message: pb.Session, observation: pb.Observation | ObservedState) -> None:
        """Write the session into an empty message."""
        message.session_id = self.id
        message.epoch = self.epoch
        message.step_index = self.next_index
        message.seed = self.plan.seed
        message.dynamics_seed = self.plan.dynamics_seed
        message.member = self.member
        copy_observation(message.observation, observation)

    def lose(self, cause: str) -> None:
        """Mark the session as lost and free its resources. Later calls get the cause until the lease expires."""
        self.lost = cause
        self.last_request = self.last_reply = None
        self.host.close()

    def close(self) -> None:
        """Free the session's resources. Calls that waited for it, and later ones, raise UNKNOWN_SESSION."""
        self.closed = True
        self.lose("closed")


def unknown_session(session_id: str) -> CallError:
    problem = f"no session {session_id[:64]!r}: closed, expired or never opened here; open a new one"
    return CallError("UNKNOWN_SESSION", problem)


def digest_actions(actions: Sequence[pb.Action | str]) -> tuple[str, ...] | bytes:
    """Return a key that recognizes a repeated turn: short texts as they are, otherwise a digest.

    It is computed from the request, because an environment may change the actions that it receives.
    """
    texts = [
        action if isinstance(action, str) else action.text
        for action in actions
        if isinstance(action, str) or action.WhichOneof("kind") == "text"
    ]
    if len(texts) < len(actions):
        message: Message = pb.StepRequest(actions=actions)  # type: ignore[arg-type]
    elif sum(map(len, texts)) <= SHORT_TEXT:
        return tuple(texts)
    else:
        message = pb.StepColumns(actions=texts)
    return hashlib.blake2b(message.SerializeToString(), digest_size=16).digest()


def digest_reset(request: pb.ResetRequest) -> tuple[int | None, int | None] | bytes:
    """Return a key that recognizes a repeated Reset, which may have come in columns before."""
    if request.HasField("options") or request.HasField("want") or request.HasField("limits"):
        return digest_request(request)
    seed = request.seed if request.HasField("seed") else None
    return seed, request.dynamics_seed if request.HasField("dynamics_seed") else None


def digest_request(request: Message) -> bytes:
    """Return a key that recognizes a repeated request: its bytes if it is short, which is faster, else their digest."""
    data = request.SerializeToString(deterministic=True)
    return data if len(data) <= _SHORT_BYTES else hashlib.sha256(data).digest()
