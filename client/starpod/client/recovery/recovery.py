"""Recovery of session calls after server failures: retries, rebuilds of lost sessions, checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from starpod.client.connection import Method, SessionStep, StepBatch
from starpod.client.connection.calls import Request, Response
from starpod.client.errors import Overloaded, SessionLost, StarpodError, UnknownSession, Unreachable
from starpod.client.history import Reply, Restored, step_reply
from starpod.client.observation import Transition
from starpod.client.pool.pool import ServerPool
from starpod.client.pool.replica import Replica
from starpod.client.recovery.checkpoints import SessionCheckpoints
from starpod.client.recovery.hot_path import deliver, fail, finish
from starpod.client.recovery.rebuild import rebuild
from starpod.client.recovery.reset import PendingReset
from starpod.client.recovery.state import CLOSED, RetryState, SessionState
from starpod.client.snapshot import Snapshot
from starpod.v1 import environment_pb2 as pb

logger = logging.getLogger("starpod.client")

T = TypeVar("T")


class Recovery:
    """Receiver of the replies to all sessions' steps. It retries failed calls and recovers lost sessions.

    Attributes:
        enabled, patience: the arguments `recovery` and `patience` of Fleet.
        recoveries: number of recovered sessions.
        checkpoints: takes snapshots of sessions that cannot be replayed.
    """

    def __init__(self, pool: ServerPool, *, enabled: bool, patience: float) -> None:
        self.enabled = enabled
        self.patience = patience
        self.recoveries = 0
        self.checkpoints = SessionCheckpoints(self)
        self._pool = pool
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Cancel all recoveries. Their callers get Unreachable."""
        self._closed = True
        # Let new tasks start: one that is cancelled before cannot report Unreachable to its caller.
        await asyncio.sleep(0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- steps, as a StepReceiver ----------------------------------------------------------------------------------

    def stepped(self, batch: StepBatch) -> None:
        deliver(batch, self._settle)

    def answered(self, step: SessionStep, response: pb.StepResponse) -> None:
        assert isinstance(step, SessionState)
        message = response.transition
        show_key = step.show_key if step.want is None else step.step_shows_key
        self._settle(step, Transition.from_proto(message, step.actions, show_key=show_key), step_reply(message))

    def refused(self, step: SessionStep, error: StarpodError) -> None:
        """Wait or recover the session, then send the step again."""
        assert isinstance(step, SessionState)
        state, retry = step, step.retry
        if retry is None or retry.actions is not state.actions or retry.step_index != state.step_index:
            retry = state.retry = RetryState(_now() + self.patience, state.actions, state.step_index)

        def resubmit() -> None:
            retry.step_index = state.step_index
            state.replica.submit(state)

        self._try_again(state, error, retry, resubmit, partial(fail, state))

    def _settle(self, state: SessionState, transition: Transition, reply: Reply) -> None:
        if state.checkpoints:
            self.checkpoints.step(state, transition, reply)
        else:
            finish(state, transition, reply)

    # --- other calls -----------------------------------------------------------------------------------------------

    def reset_refused(self, pending: PendingReset, error: StarpodError) -> None:
        """Wait or recover the session, then send the reset again. The old episode is not replayed."""
        retry = pending.retry = pending.retry or RetryState(_now() + self.patience)
        self._try_again(pending.state, error, retry, pending.submit, pending.fail, replay=False)

    async def call(
        self, state: SessionState, method: Method[Request, Response], build: Callable[[], Request]
    ) -> Response:
        """Make a call on a session (not a step or reset) with recovery.

        Args:
            build: makes the request for each attempt, because a recovered session has another id.
        """
        retry = RetryState(_now() + self.patience)
        while True:
            if state.closed:
                raise RuntimeError(CLOSED)
            try:
                return await state.replica.call(method, build(), retry.until)
            except StarpodError as error:
                await self.bring_back(state, error, retry)

    async def run_in_turn(self, state: SessionState, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work on a session after all its earlier calls.

        The work is completed even if the caller is cancelled, because the session must learn what the server did.
        """
        await state.acquire()
        task = self._spawn(work())
        task.add_done_callback(lambda _: state.release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise Unreachable("The fleet was closed.") from None
            del task  # or the traceback of a cancelled fork would keep its copies open
            raise

    async def close_sessions(self, states: Iterable[SessionState], seconds: float) -> None:
        """End sessions within `seconds`, with one call per server.

        Sessions on an unreachable server are closed once it is back. Busy sessions are closed once their call is over.
        """
        by_replica: defaultdict[Replica, list[str]] = defaultdict(list)
        until = _now() + seconds
        try:
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
        except asyncio.CancelledError:
            for replica, ids in by_replica.items():
                replica.closer.close_later(ids)
            raise
        await asyncio.gather(*(replica.closer.close(ids, until) for replica, ids in by_replica.items()))

    # --- retry and rebuild -----------------------------------------------------------------------------------------

    def _try_again(
        self,
        state: SessionState,
        error: StarpodError,
        retry: RetryState,
        resubmit: Callable[[], None],
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
                await self.bring_back(state, error, retry, replay=replay)
            resubmit()

        if self._closed:
            fail(error)
        else:
            self.run(recover(), fail)

    async def bring_back(
        self, state: SessionState, error: StarpodError, retry: RetryState, *, replay: bool = True
    ) -> None:
        """Recover a lost session on any suitable server.

        Args:
            error: why the call failed. It is raised if its advice is not "reopen".
            retry: the retries of that call. Its deadline also limits the recovery.
            replay: False begins the episode without repeating its steps.

        Raises:
            StarpodError: the session cannot be recovered.
        """
        if error.advice != "reopen":
            raise error
        history = state.history
        if history is None:
            raise SessionLost(
                f"The session was lost and cannot be recovered ({self._why_not(state)}): {error}",
                metadata=error.metadata,
            ) from error
        retry.count_loss(error)
        environment_id, version = history.environment
        cause = error
        while True:
            if _now() > retry.until:
                raise error
            if state.checkpoints and isinstance(history.origin, Restored):
                # There is nothing to replay, so any version that can restore the snapshot is suitable.
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
                if isinstance(failure, SessionLost):  # the start or a replayed turn seems to end the session
                    retry.count_loss(failure)
                if not isinstance(failure, Overloaded):  # if it is, try the next server; the pool waits if all are full
                    await asyncio.sleep(retry.backoff.wait())
                continue
            finally:
                replica.placing -= 1
            if not isinstance(cause, UnknownSession):  # a lost session counts until it is closed or its lease ends
                state.replica.closer.close_later([state.session_id])
            state.move_to(replica, message)
            state.version = spec.version
            state.recoveries += 1
            self.recoveries += 1
            if state.checkpoints and not state.done:
                state.show(message.observation)
            return

    def _why_not(self, state: SessionState) -> str:
        if not self.enabled:
            return "recovery is off"
        return f"{state.environment_id} is not deterministic, and there is no snapshot to continue from"

    def run(self, work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> None:
        """Run work as a task, which `close` cancels. `fail` receives its error."""
        self._spawn(_run_or_fail(work, fail))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _run_or_fail(work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> None:
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
