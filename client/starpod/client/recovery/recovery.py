"""Retries and recovers session calls after server failures: waits, rebuilds lost sessions, takes checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from starpod.client.connection import SNAPSHOT, Method, Step, StepBatch
from starpod.client.connection.calls import Request, Response
from starpod.client.errors import Overloaded, SessionLost, StarpodError, UnknownSession, Unreachable
from starpod.client.history import Reply, Restored, step_reply
from starpod.client.observation import Transition
from starpod.client.pool.pool import ServerPool
from starpod.client.pool.replica import Replica
from starpod.client.recovery.hot_path import deliver, fail, finish
from starpod.client.recovery.rebuild import rebuild
from starpod.client.recovery.reset import PendingReset
from starpod.client.recovery.state import CLOSED, RetryState, SessionState
from starpod.client.snapshot import Snapshot
from starpod.v1 import environment_pb2 as pb

# A session that is lost this often over one and the same call was probably killed by that call: alone, or with all that
# its server held. Servers go for other reasons too, hence the patience with those.
MAX_LOSSES = 3
MAX_CRASHES = 10

logger = logging.getLogger("starpod.client")

T = TypeVar("T")


class Recovery:
    """Is told what becomes of the steps of all sessions of a fleet, and helps where a call does not go well.

    enabled, patience: the arguments `recovery` and `patience` of Fleet.
    recoveries: how often a session was brought back.
    """

    def __init__(self, pool: ServerPool, *, enabled: bool, patience: float) -> None:
        self.enabled = enabled
        self.patience = patience
        self.recoveries = 0
        self._pool = pool
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Gives up what is under way: those who wait get Unreachable."""
        self._closed = True
        # A task that has not begun cannot tell anyone that it was cancelled.
        await asyncio.sleep(0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- steps, as a StepReceiver ----------------------------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        deliver(batch, self._settle)

    def answered(self, step: Step, response: pb.StepResponse) -> None:
        assert isinstance(step, SessionState)
        message = response.transition
        show_key = step.show_key if step.want is None else step.step_shows_key
        self._settle(step, Transition.from_proto(message, step.actions, show_key=show_key), step_reply(message))

    def refused(self, step: Step, error: StarpodError) -> None:
        """Waits, or brings the session back, and sends the step again."""
        assert isinstance(step, SessionState)
        state, retry = step, step.retry
        if retry is None or retry.actions is not state.actions or retry.step_index != state.step_index:
            retry = state.retry = RetryState(_now() + self.patience, state.actions, state.step_index)

        def again() -> None:
            retry.step_index = state.step_index
            state.replica.submit(state)

        self._try_again(state, error, retry, again, partial(fail, state))

    def _settle(self, state: SessionState, transition: Transition, reply: Reply) -> None:
        if state.checkpoints:
            self._spawn(_failing(self._checkpoint_step(state, transition, reply), partial(fail, state)))
        else:
            finish(state, transition, reply)

    # --- other calls -----------------------------------------------------------------------------------------------

    def reset_refused(self, pending: PendingReset, error: StarpodError) -> None:
        """The same for a reset: where the session was lost, its episode begins anew without a replay."""
        retry = pending.retry = pending.retry or RetryState(_now() + self.patience)
        self._try_again(pending.state, error, retry, pending.submit, pending.fail, replay=False)

    async def call(
        self, state: SessionState, method: Method[Request, Response], build: Callable[[], Request]
    ) -> Response:
        """A call on a session other than a step or a reset, with recovery. build: makes the message anew."""
        retry = RetryState(_now() + self.patience)
        while True:
            if state.closed:
                raise RuntimeError(CLOSED)
            try:
                return await state.replica.call(method, build(), retry.until)
            except StarpodError as error:
                await self._bring_back(state, error, retry)

    async def alone(self, state: SessionState, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a call once those that were made before it on the session are over. If the caller is cancelled then, it
        still runs to its end: the session has to know what the server did."""
        await state.acquire()
        task = self._spawn(work())
        task.add_done_callback(lambda _: state.release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise Unreachable("The fleet was closed.") from None
            raise

    async def close_sessions(self, states: Iterable[SessionState], seconds: float) -> None:
        """Ends sessions, one call per server, within `seconds`. Those of a server that is away are closed when it is
        back, and those with a call under way, whose caller may have given it up, when that is over."""
        by_replica: defaultdict[Replica, list[str]] = defaultdict(list)
        until = _now() + seconds
        for state in states:
            try:
                async with asyncio.timeout_at(until if state.busy else None):
                    await state.acquire()
            except TimeoutError:
                self._spawn(self.close_sessions([state], self.patience))
                continue
            if not state.closed:
                state.closed = True
                state.replica.sessions.discard(state)
                by_replica[state.replica].append(state.session_id)
            state.release()
        await asyncio.gather(*(replica.close_sessions(ids, until) for replica, ids in by_replica.items()))

    # --- retry and rebuild -----------------------------------------------------------------------------------------

    def _try_again(
        self,
        state: SessionState,
        error: StarpodError,
        retry: RetryState,
        again: Callable[[], None],
        fail: Callable[[BaseException], None],
        *,
        replay: bool = True,
    ) -> None:
        async def recover() -> None:
            if error.advice == "retry":
                wait = retry.backoff.wait(error.retry_after)
                if _now() + wait > retry.until:
                    raise error
                await asyncio.sleep(wait)
            else:
                await self._bring_back(state, error, retry, replay=replay)
            again()

        if self._closed:
            fail(error)
        else:
            self._spawn(_failing(recover(), fail))

    async def _bring_back(
        self, state: SessionState, error: StarpodError, retry: RetryState, *, replay: bool = True
    ) -> None:
        """Makes a lost session stand where it stood, on whatever server can. Raises what cannot be recovered from."""
        if error.advice != "reopen":
            raise error
        history = state.history
        if history is None:
            raise SessionLost(
                f"The session was lost and cannot be brought back ({self._why_not(state)}): {error}",
                metadata=error.metadata,
            ) from error
        retry.losses += 1
        if isinstance(error, SessionLost) and retry.losses >= MAX_LOSSES:
            raise error
        if retry.losses >= MAX_CRASHES:
            raise SessionLost(
                f"The session was lost {retry.losses} times over one and the same call, which seems to take its"
                f" server down each time: {error}",
                metadata={"advice": "give_up"},
            ) from error
        environment_id, version = history.environment
        while True:
            if _now() > retry.until:
                raise error
            if state.checkpoints and isinstance(history.origin, Restored):
                # A snapshot, and nothing to replay: any version that restores it will do.
                snapshot = Snapshot.from_proto(history.origin.snapshot)
                replica, spec = await self._pool.choose_for(snapshot, retry.until)
            else:
                replica, spec = await self._pool.choose(environment_id, f"=={version}", retry.until)
            replica.placing += 1
            try:
                message = await rebuild(replica, history, retry.until, member=state.member, replay=replay)
            except StarpodError as failure:
                if failure.advice == "give_up":
                    raise
                error = failure
                if not isinstance(failure, Overloaded):  # else another one is asked now: the pool waits if all are full
                    await asyncio.sleep(retry.backoff.wait())
                continue
            finally:
                replica.placing -= 1
            if not isinstance(error, UnknownSession | SessionLost):
                state.replica.close_later([state.session_id])
            state.place(replica, message)
            state.version = spec.version
            state.recoveries += 1
            self.recoveries += 1
            if state.checkpoints and not state.done:
                state.show(message.observation)
            return

    def _why_not(self, state: SessionState) -> str:
        if not self.enabled:
            return "recovery is off"
        return f"{state.environment_id} is not deterministic, and there is no snapshot to go on from"

    # --- checkpoints -----------------------------------------------------------------------------------------------

    async def _checkpoint_step(self, state: SessionState, transition: Transition, reply: Reply) -> None:
        """Takes a snapshot before the step's reply is handed on: what the caller has seen can be gone back to."""
        try:
            await self._take_checkpoint(state)
        except StarpodError as error:
            self.refused(state, error)
        else:
            # The snapshot stands for the step: nothing is left to replay.
            finish(state, transition, reply, log=False)

    def checkpoint_first(self, pending: PendingReset) -> None:
        """Takes a snapshot of the new episode before its first observation is handed on."""

        async def checkpoint() -> None:
            await self.checkpoint_all([pending.state])
            pending.finish()

        self._spawn(_failing(checkpoint(), pending.fail))

    async def checkpoint_all(self, states: Iterable[SessionState]) -> None:
        """Takes a snapshot of each, bringing back what is lost before that."""
        for state in states:
            retry = RetryState(_now() + self.patience)
            while state.checkpoints:
                try:
                    await self._take_checkpoint(state)
                    break
                except StarpodError as error:
                    await self._bring_back(state, error, retry)

    async def _take_checkpoint(self, state: SessionState) -> None:
        """Where the server refuses it, the session goes on without recovery. Raises what advises to reopen."""
        history = state.history
        assert history is not None
        try:
            response = await state.replica.call(
                SNAPSHOT, pb.SnapshotRequest(session_id=state.session_id), _now() + self.patience
            )
        except StarpodError as error:
            if error.advice == "reopen":
                raise
            logger.warning("%s cannot be checkpointed and will not be recovered: %s", state, error)
            state.history, state.checkpoints = None, False
            return
        history.begin(
            Restored(response.snapshot, state.version, state.wanted.to_proto(), history.root.lease_seconds), None
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _failing(work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> None:
    """Does the work for a call. fail: tells whoever waits for the call that it did not go well."""
    try:
        await work
    except StarpodError as error:
        fail(error)
    except asyncio.CancelledError:
        fail(Unreachable("The fleet was closed."))
        raise
    except Exception as bug:
        fail(bug)
        raise


def _now() -> float:
    return asyncio.get_running_loop().time()
