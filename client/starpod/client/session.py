"""What the caller holds: one session, wherever it lives at the moment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from starpod.client.errors import ServerBug, StarpodError
from starpod.client.log import History, digest_observation
from starpod.client.observation import (
    Action,
    EndReason,
    Limits,
    Observation,
    Transition,
    Turn,
    Want,
    action_to_proto,
    as_turn,
    observation_from_proto,
)
from starpod.client.transport import Backoff
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from starpod.client.fleet import Fleet
    from starpod.client.mending import Mender
    from starpod.client.replica import Replica
    from starpod.client.snapshot import Snapshot

CLOSED = "The session is closed: open another one."


class Gather:
    """Collects the results of one `step_many` or `reset_many`: one future for all of them."""

    __slots__ = ("failed", "future", "missing", "results")

    def __init__(self, count: int, future: asyncio.Future[None]) -> None:
        self.results: list[Any] = [None] * count
        self.missing = count
        self.failed = False
        self.future = future

    async def all(self) -> list[Any]:
        """Every result. Raises the first error, once all are in."""
        await self.future
        if self.failed:
            raise next(result for result in self.results if isinstance(result, BaseException))
        return self.results

    def put(self, slot: int, result: Any) -> None:
        self.results[slot] = result
        self.count(1)

    def count(self, done: int) -> None:
        """So many more results are in."""
        self.missing -= done
        if not self.missing and not self.future.done():
            self.future.set_result(None)


def hand_over(sink: Any, slot: int, result: Any) -> None:
    """Gives a result to whoever waits for it: a future (slot -1) or a Gather."""
    if slot >= 0:
        sink.put(slot, result)
    elif not sink.done():
        sink.set_result(result)


def hand_error(sink: Any, slot: int, error: BaseException) -> None:
    """The same for an error."""
    if slot >= 0:
        sink.failed = True
        sink.put(slot, error)
    elif not sink.done():
        sink.set_exception(error)


class Trouble:
    """What has befallen the call in flight: it may be tried until the loop time `until`."""

    __slots__ = ("backoff", "losses", "step_index", "turn", "until")

    def __init__(self, turn: Turn, step_index: int, until: float) -> None:
        self.turn = turn
        self.step_index = step_index
        self.until = until
        self.losses = 0
        self.backoff = Backoff()


class Session:
    """One agent's place in an environment: an episode now, another after `reset`.

    Made by `Fleet.open`, `Fleet.restore` and `fork`. Calls on one session run one after the other, in the order in
    which they were made; calls on different sessions run together. If its server is lost, the session moves to another
    one and the caller sees a slow call.

    seed, dynamics_seed: those of the episode; opening again with both gives the same episode.
    member: place in the group that it was opened with, from 0.
    instructions: for the agent, with the options in force.
    limits: those in force; 0 means none.
    environment_id, version: what it runs.
    recoveries: how often it was brought back after a loss.
    """

    __slots__ = (
        "__weakref__",
        "_busy",
        "_checkpoints",
        "_epoch",
        "_fleet",
        "_history",
        "_last",
        "_mender",
        "_plain",
        "_replica",
        "_session_id",
        "_show_key",
        "_sink",
        "_slot",
        "_step_index",
        "_trouble",
        "_turn",
        "_turn_want",
        "_waiting",
        "closed",
        "dynamics_seed",
        "environment_id",
        "instructions",
        "limits",
        "member",
        "recoveries",
        "seed",
        "version",
        "want",
    )

    def __init__(
        self,
        fleet: Fleet,
        mender: Mender,
        replica: Replica,
        message: pb.Session,
        *,
        environment_id: str,
        version: str,
        instructions: str,
        limits: Limits,
        want: Want,
        history: History | None,
        checkpoints: bool,
    ) -> None:
        self._fleet = fleet
        self._mender = mender
        self._replica = replica
        self._history = history
        self._checkpoints = checkpoints
        self.environment_id = environment_id
        self.version = version
        self.instructions = instructions
        self.limits = limits
        self.want = want
        self.member = message.member
        self.closed = False
        self.recoveries = 0
        self._show_key = want.state_key
        self._last: Observation | Transition
        # The turn in flight and who waits for its transition: a future (slot -1) or a Gather.
        self._busy = False
        self._plain = True
        self._turn: Turn = ()
        self._turn_want: Want | None = None
        self._sink: Any = None
        self._slot = -1
        self._waiting: deque[asyncio.Future[None]] | None = None
        self._start(message)
        self._place(replica, message)

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def observation(self) -> Observation:
        """What the agent sees now."""
        last = self._last
        return last.observation if isinstance(last, Transition) else last

    @property
    def done(self) -> bool:
        """Whether the episode is over: `reset` starts the next one."""
        return isinstance(self._last, Transition) and self._last.done

    @property
    def end_reason(self) -> EndReason:
        """Why the episode is over; NONE while it is not."""
        return self._last.end_reason if isinstance(self._last, Transition) else EndReason.NONE

    @property
    def step_index(self) -> int:
        """Turns taken in the episode."""
        return self._step_index

    @property
    def address(self) -> str:
        """The server that holds it now."""
        return self._replica.address

    def __repr__(self) -> str:
        return (
            f"Session({self.environment_id} {self.version}, seed={self.seed}, step={self._step_index}, {self.address})"
        )

    # --- calls -----------------------------------------------------------------------------------------------------

    async def step(self, actions: Action | Iterable[Action], *, want: Want | None = None) -> Transition:
        """Plays one turn: one action, or several in order until one ends the episode.

        A bad action is an outcome with `valid=False`, not an error. Raises EpisodeOver after the end.
        `want` holds for this turn alone.
        """
        turn = (actions,) if type(actions) is str else as_turn(actions)
        if self._busy:
            await self._acquire()
        future = self._fleet.loop.create_future()
        self._submit(turn, want, future, -1)
        transition: Transition = await future
        return transition

    async def reset(
        self,
        *,
        seed: int | None = None,
        dynamics_seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        want: Want | None = None,
        limits: Limits | None = None,
    ) -> Observation:
        """Starts a new episode and returns its first observation. Options, want and limits stay unless given."""
        return await self._fleet.reset(self, seed, dynamics_seed, options, want, limits)

    async def render(self, mode: str = "text") -> str | bytes:
        """One frame: str for "text" and "html", the bytes of an image for "png"."""
        return await self._fleet.render(self, mode)

    async def fork(self, count: int = 1, *, reseed: bool = False, dynamics_seeds: Iterable[int] = ()) -> list[Session]:
        """Copies of the present state in new sessions.

        With `reseed` each copy gets luck of its own (from `dynamics_seeds`, one per copy, if given), else the same
        actions give the same luck as in the original.
        """
        return await self._fleet.fork(self, count, reseed, tuple(dynamics_seeds))

    async def snapshot(self) -> Snapshot:
        """The whole state as bytes, for `Fleet.restore` here or anywhere else."""
        return await self._fleet.snapshot(self)

    async def close(self) -> None:
        """Ends the session. Harmless to repeat."""
        await self._fleet.close_sessions([self])

    # --- the turn in flight ----------------------------------------------------------------------------------------

    def _submit(self, turn: Turn, want: Want | None, sink: Any, slot: int) -> None:
        """Sends a turn: no other call may be in flight. What becomes of it, the sink is told."""
        self._busy = True
        self._sink = sink
        self._slot = slot
        if self.closed:
            self._fail(RuntimeError(CLOSED))
            return
        self._turn = turn
        self._plain = want is None and (
            type(turn[0]) is str if len(turn) == 1 else all(type(action) is str for action in turn)
        )
        self._turn_want = want
        self._replica.submit(self)

    def _settle(self, transition: Transition, key: bytes, digest: int) -> None:
        """The reply to the turn in flight: logs it and hands it to whoever waits."""
        if self._checkpoints:
            self._mender.checkpoint(self, transition, key, digest)
        else:
            self._finish(transition, key, digest)

    def _finish(self, transition: Transition, key: bytes, digest: int) -> None:
        self._step_index += 1
        self._last = transition
        history = self._history
        if history is not None:
            history.turns.append(self._turn)
            history.keys.append(key)
            history.digests.append(digest)
        hand_over(self._sink, self._slot, transition)
        if self._waiting is None:
            self._busy = False
        else:
            self._release()

    def _encode(self) -> tuple[str, pb.StepRequest]:
        """The turn in flight as a call of its own."""
        want = self._turn_want
        return "step", pb.StepRequest(
            session_id=self._session_id,
            epoch=self._epoch,
            step_index=self._step_index,
            actions=map(action_to_proto, self._turn),
            want=None if want is None else want.to_proto(state_key=self._history is not None),
        )

    def _answer(self, kind: str, response: Any) -> None:
        if kind != "step":
            self._fail(ServerBug(f"The server answered a step call with {kind or 'nothing'}."))
            return
        message: pb.Transition = response.transition
        want = self._turn_want
        self._settle(
            Transition.from_proto(message, show_key=self._show_key if want is None else want.state_key),
            message.observation.state_key,
            digest_observation(message.observation, message.reward),
        )

    def _refuse(self, error: StarpodError) -> None:
        self._mender.refused(self, error)

    def _fail(self, error: BaseException) -> None:
        """The turn in flight failed for good: its place in the episode stays free."""
        hand_error(self._sink, self._slot, error)
        self._release()

    # --- one call at a time ----------------------------------------------------------------------------------------

    async def _acquire(self) -> None:
        """Waits until all calls that were made before are over. The session is the caller's then: `_submit` or a
        Restart ends that with the reply, anything else with `_release`."""
        if not self._busy:
            self._busy = True
            return
        if self._waiting is None:
            self._waiting = deque()
        turn = self._fleet.loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancel() and not turn.cancelled():
                self._release()  # it had come already
            raise

    def _release(self) -> None:
        """Hands the session, busy as it is, to the call that has waited longest: none that comes later overtakes it."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting = None
        self._busy = False

    # --- where it lives --------------------------------------------------------------------------------------------

    def _start(self, message: pb.Session) -> None:
        """A new episode."""
        self._trouble: Trouble | None = None
        self.seed = message.seed
        self.dynamics_seed = message.dynamics_seed
        self._show(message.observation)

    def _restart(self, message: pb.Session) -> None:
        """A new episode, where it lives."""
        self._start(message)
        self._epoch, self._step_index = message.epoch, message.step_index

    def _show(self, observation: pb.Observation) -> None:
        self._last = observation_from_proto(observation, observation.state_key if self._show_key else b"")

    def _place(self, replica: Replica, message: pb.Session) -> None:
        """It lives there, under this id, from now on."""
        self._replica.sessions.discard(self)
        self._replica = replica
        self._session_id = message.session_id
        self._epoch = message.epoch
        self._step_index = message.step_index
        replica.sessions.add(self)
