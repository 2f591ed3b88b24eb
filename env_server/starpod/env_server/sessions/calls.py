"""The contract's calls, independent of the transport: unary calls and the Stream share them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import bad_argument, unsupported
from starpod.env_server.episodes.live_episode import TurnResult, Want
from starpod.env_server.sessions.creation import SessionCreation
from starpod.env_server.sessions.requests import check_actions, check_ids, snapshot_too_large, wanted
from starpod.env_server.sessions.responses import ENVELOPE_BYTES
from starpod.env_server.sessions.seal import digest_snapshot
from starpod.env_server.sessions.session import ServedSession, digest_reset
from starpod.env_server.sessions.table import SessionTable
from starpod.env_server.sessions.worker import Worker
from starpod.v1 import environment_pb2 as pb


class Calls:
    """The contract's calls on the sessions of this process. Nothing is locked except single sessions."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._limits = worker.limits
        self._guard = worker.failures.guard
        self._creation = SessionCreation(worker)

    async def open(self, table: SessionTable, request: pb.OpenRequest) -> pb.OpenResponse:
        return await table.once(request, pb.OpenResponse, self._creation.open)

    async def fork(self, table: SessionTable, request: pb.ForkRequest) -> pb.ForkResponse:
        return await table.once(request, pb.ForkResponse, self._creation.fork)

    async def restore(self, table: SessionTable, request: pb.RestoreRequest) -> pb.RestoreResponse:
        return await table.once(request, pb.RestoreResponse, self._creation.restore)

    async def reset(self, table: SessionTable, request: pb.ResetRequest) -> pb.ResetResponse:
        session = table.find(request.session_id)
        async with session:
            if (last_reply := session.earlier_reset(request)) is not None:
                return last_reply
            environment = session.environment
            plan = session.plan_episode(
                request.seed if request.HasField("seed") else None,
                request.dynamics_seed if request.HasField("dynamics_seed") else None,
            )
            if request.HasField("options"):
                plan = plan._replace(options=await self.worker.read_options(environment, request.options))
            if request.HasField("want"):
                plan = plan._replace(want=wanted(environment, request.want))
            if request.HasField("limits"):
                plan = plan._replace(limits=convert.limits_from(request.limits, plan.limits))
            started = await self._guard(session, session.host.reset(plan), "Reset")
            session.begin_episode(plan)
            response = session.reset_response(started)
            session.last_request, session.last_reply = digest_reset(request), response.SerializeToString()
            self._expect_sendable(session, "Reset")
            return response

    async def step(self, table: SessionTable, request: pb.StepRequest) -> pb.StepResponse:
        session = table.find(request.session_id)
        check_actions(request.actions, self._limits)
        want = None
        if request.HasField("want"):
            want = wanted(session.environment, request.want)
        transition = await self.turn(session, request.epoch, request.step_index, request.actions, want)
        response = pb.StepResponse(next_step_index=request.step_index + 1)
        self.write_transition(response.transition, session, transition)
        return response

    def write_transition(
        self, message: pb.Transition, session: ServedSession, transition: TurnResult | pb.Transition
    ) -> None:
        """Write a transition into an empty message. If this fails, the session is lost and ENVIRONMENT_BUG raised."""
        try:
            convert.fill_transition(message, transition)
        except Exception as error:
            raise self.worker.failures.break_off(session, error) from error

    async def turn(
        self,
        session: ServedSession,
        epoch: int,
        index: int,
        actions: Sequence[pb.Action | str],
        want: Want | None,
    ) -> TurnResult | pb.Transition:
        """Execute a turn exactly once. A repeated call with the same index and actions gets the same reply.

        Args:
            epoch: epoch of the session that the caller expects.
            index: step index of the turn.
            want: optional fields of the observation; None selects the session's own.

        Raises:
            CallError: the turn is out of order, the session is gone, or the environment failed.
        """
        async with session:
            if (last_reply := session.earlier_reply(epoch, index, actions)) is not None:
                return last_reply
            action_list = convert.actions_from(actions)
            start = time.perf_counter()
            transition: TurnResult | pb.Transition = await self._guard(
                session, session.host.turn(action_list, want or session.want), "Step"
            )
            self.worker.metrics.step(session.environment.spec.id, time.perf_counter() - start)
            if isinstance(transition, TurnResult) and not transition.is_immutable:
                message = pb.Transition()
                self.write_transition(message, session, transition)
                transition = message
            session.keep_turn(actions, transition)
            self._expect_sendable(session, "Step")
            return transition

    def _expect_sendable(self, session: ServedSession, verb: str) -> None:
        """Raise ENVIRONMENT_BUG if the reply that a session keeps is too large for a message. The session is lost."""
        reply, limit, size = session.last_reply, self._limits.max_message_bytes, 0
        if isinstance(reply, bytes):
            size = len(reply)
        elif isinstance(reply, TurnResult) and isinstance(reply.parts, str) and 4 * len(reply.parts) > limit:
            size = len(reply.parts.encode(errors="replace"))
        if limit and size + ENVELOPE_BYTES > limit:
            raise self.worker.failures.break_off_large(session, size, limit, verb)

    async def render(self, table: SessionTable, request: pb.RenderRequest) -> pb.RenderResponse:
        session = table.find(request.session_id)
        mode = request.mode or "text"
        if mode not in session.environment.spec.render_modes:
            modes = ", ".join(session.environment.spec.render_modes)
            raise bad_argument("mode", f"is {mode!r}; {session.environment.spec.id} renders {modes}")
        async with session:
            session.check()
            picture = await self._guard(session, session.host.render(mode), "Render")
        if isinstance(picture, bytes):
            return pb.RenderResponse(mime="image/png", data=picture)
        mime = "text/html" if mode == "html" else "text/plain"
        return pb.RenderResponse(mime=f"{mime}; charset=utf-8", data=picture.encode())

    async def snapshot(self, table: SessionTable, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        session = table.find(request.session_id)
        if not session.environment.spec.snapshot:
            raise unsupported(session.environment, "snapshot", "has no state that could be saved")
        async with session:
            session.check()
            spec = session.environment.spec
            state = await self._guard(session, session.host.save(), "Snapshot")
            state = self.worker.seal.seal(spec.id, spec.version, state)
            if len(state) > self._limits.max_snapshot_bytes:
                raise snapshot_too_large(len(state), self._limits)
            snapshot = pb.SessionSnapshot(
                environment_id=spec.id,
                environment_version=spec.version,
                state=state,
                digest=digest_snapshot(spec.id, spec.version, state),
            )
            return pb.SnapshotResponse(snapshot=snapshot, epoch=session.epoch, step_index=session.next_index)

    async def renew(self, table: SessionTable, request: pb.RenewRequest) -> pb.RenewResponse:
        check_ids(request.session_ids, self._limits)
        now = time.monotonic()
        missing_ids = []
        for session_id in request.session_ids:
            session = table.get(session_id)
            if session is None or session.lost:
                missing_ids.append(session_id)
            else:
                session.last_call = now
        return pb.RenewResponse(missing=missing_ids)

    async def close(self, table: SessionTable, request: pb.CloseRequest) -> pb.CloseResponse:
        check_ids(request.session_ids, self._limits)
        for session_id in request.session_ids:
            session = table.get(session_id)
            if session is not None:
                table.closed_ids.add(session_id)
                self.worker.drop(table, session)
        return pb.CloseResponse()
