"""The contract's calls, independent of the transport: unary calls and the Stream share them."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf import struct_pb2

from starpod.env_server.authoring.environment import Busy, Environment, EnvironmentOptions, Limits, derive_seed
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError, EnvironmentRaised, bad_argument, overloaded, unsupported
from starpod.env_server.episodes.live_episode import ObservedState, Pictures, SavedEpisode, TurnResult, Want
from starpod.env_server.episodes.state import StateError
from starpod.env_server.episodes.timing import clock
from starpod.env_server.operation.tenants import SLICE_SECONDS
from starpod.env_server.processes.hosts import EpisodeHost, HostDied, LocalHost, ResetPlan
from starpod.env_server.processes.threads import Hung
from starpod.env_server.sessions.requests import check_actions, check_options, parse_options, snapshot_too_large
from starpod.env_server.sessions.responses import ENVELOPE_BYTES, too_large
from starpod.env_server.sessions.seal import digest_snapshot
from starpod.env_server.sessions.session import ServedSession, digest_reset
from starpod.env_server.sessions.table import Created, SessionTable
from starpod.env_server.sessions.worker import Worker
from starpod.v1 import environment_pb2 as pb

R = TypeVar("R")
Make = Callable[[int, list[ServedSession]], Awaitable[pb.Observation | ObservedState]]
"""Function that creates a member's session, appends it to the list and returns its first observation."""


class Calls:
    """The contract's calls on the sessions of this process. Nothing is locked except single sessions."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._limits = worker.limits
        self._guard = worker.guard

    # --- creating sessions ---------------------------------------------------------------------------------------

    async def open(self, table: SessionTable, request: pb.OpenRequest) -> pb.OpenResponse:
        return await table.once(request.key, request, pb.OpenResponse, functools.partial(self._open, table, request))

    async def _open(self, table: SessionTable, request: pb.OpenRequest) -> pb.OpenResponse:
        environment = self.worker.registry.find(request.environment_id, request.version)
        members = self._members(request)
        options = await self._options(environment, request.options)
        limits = convert.limits_from(request.limits, environment.spec.limits)
        want = self._check_want(environment, convert.want_from(request.want))
        lease = self._lease(request.lease_seconds)
        seed = request.seed if request.HasField("seed") else secrets.randbits(48)
        group_plan = ResetPlan(options, limits, seed, request.dynamics_seed, want)
        response = pb.OpenResponse()
        pictures: Pictures = {}
        first_host: LocalHost | None = None

        async def make(member: int, sessions: list[ServedSession]) -> pb.Observation | ObservedState:
            nonlocal first_host
            plan = group_plan
            if not request.HasField("dynamics_seed"):
                plan = group_plan._replace(dynamics_seed=derive_seed(seed, "member", member))
            host = self.worker.host(environment, want)
            session = ServedSession(environment, host, plan, lease, member)
            sessions.append(session)
            if first_host is not None and environment.spec.slow_reset and isinstance(host, LocalHost):
                # The start depends only on the seed, so the other members copy the first one instead of repeating a
                # slow reset.
                session.host = await self._guard(session, first_host.fork(plan.dynamics_seed), "Open")
                return await self._guard(session, session.host.observe(want, pictures), "Open")
            started = await self._guard(session, host.reset(plan._replace(pictures=pictures)), "Open")
            first_host = host if isinstance(host, LocalHost) else None
            if not sessions[1:]:
                self._describe_created(response, environment, started.instructions, limits, lease)
            return started.observation

        return await self._create(table, members, response, make)

    async def fork(self, table: SessionTable, request: pb.ForkRequest) -> pb.ForkResponse:
        return await table.once(request.key, request, pb.ForkResponse, functools.partial(self._fork, table, request))

    async def _fork(self, table: SessionTable, request: pb.ForkRequest) -> pb.ForkResponse:
        parent = table.find(request.session_id)
        if not parent.environment.spec.fork:
            raise unsupported(parent.environment, "fork", "cannot be copied in the middle of an episode")
        reseed = request.randomness == pb.FORK_RANDOMNESS_RESEED
        if request.randomness not in pb.ForkRandomness.values():
            raise bad_argument("randomness", f"is {request.randomness}; use KEEP or RESEED")
        seeds = list(request.dynamics_seeds)
        members = self._members(request)
        if seeds and not reseed:
            raise bad_argument("dynamics_seeds", "are only used with randomness RESEED")
        if seeds and len(seeds) != len(members):
            raise bad_argument("dynamics_seeds", f"has {len(seeds)} entries for {len(members)} copies")

        async def make(member: int, sessions: list[ServedSession]) -> pb.Observation:
            plan = parent.plan
            if seeds:
                plan = plan._replace(dynamics_seed=seeds[len(sessions)])
            elif reseed:
                plan = plan._replace(dynamics_seed=derive_seed(plan.dynamics_seed, "fork", parent.next_index, member))
            self.worker.make_room(parent.environment)
            host = await self._guard(parent, parent.host.fork(plan.dynamics_seed if reseed else None), "Fork")
            turns, is_over = parent.next_index, parent.over
            sessions.append(ServedSession(parent.environment, host, plan, parent.lease, member, turns, is_over))
            return await self._guard(parent, _observe_copy(host, plan.want, pictures), "Fork")

        async with parent.turn_taking():
            parent.check()
            if (request.epoch, request.step_index) != (parent.epoch, parent.next_index):
                raise parent.out_of_order(request.epoch, request.step_index)
            pictures: Pictures = {}
            return await self._create(table, members, pb.ForkResponse(), make)

    async def restore(self, table: SessionTable, request: pb.RestoreRequest) -> pb.RestoreResponse:
        return await table.once(
            request.key, request, pb.RestoreResponse, functools.partial(self._restore, table, request)
        )

    async def _restore(self, table: SessionTable, request: pb.RestoreRequest) -> pb.RestoreResponse:
        snapshot, members = request.snapshot, self._members(request)
        if len(snapshot.state) > self._limits.max_snapshot_bytes:
            raise snapshot_too_large(len(snapshot.state), self._limits)
        if digest_snapshot(snapshot.environment_id, snapshot.environment_version, snapshot.state) != snapshot.digest:
            raise bad_argument("snapshot.digest", "does not match the snapshot: it was cut, changed or mixed up")
        environment = self.worker.registry.find_restorer(snapshot.environment_id, snapshot.environment_version)
        if not environment.spec.snapshot:
            raise unsupported(environment, "snapshot", "has no state that could be restored")
        want = self._check_want(environment, convert.want_from(request.want))
        lease = self._lease(request.lease_seconds)
        try:
            state = self.worker.seal.unseal(snapshot.environment_id, snapshot.environment_version, snapshot.state)
            # The session needs seeds, options and limits here. The rest is read where the episode will run.
            episode = SavedEpisode.read(environment, state)
        except StateError as error:
            raise bad_argument("snapshot.state", str(error)) from error
        plan = ResetPlan(episode.options, episode.limits, episode.seed, episode.dynamics_seed, want)
        response = pb.RestoreResponse()
        pictures: Pictures = {}

        async def make(member: int, sessions: list[ServedSession]) -> pb.Observation:
            host = self.worker.host(environment, want)
            session = ServedSession(environment, host, plan, lease, member, episode.turns, bool(episode.end_reason))
            load = _load(host, state, rehearse=not (self.worker.seal.keyed or sessions))
            sessions.append(session)
            await self._guard(session, self._of_snapshot(load), "Restore")
            observation = await self._guard(session, self._of_snapshot(host.observe(want, pictures)), "Restore")
            if not sessions[1:]:
                instructions = await self._guard(session, self._of_snapshot(host.instructions()), "Restore")
                self._describe_created(response, environment, instructions, episode.limits, lease)
            return observation

        return await self._create(table, members, response, make)

    async def _create(self, table: SessionTable, members: range, response: Created, make: Make) -> Created:
        """Create all sessions of a group or none, and add them to the response.

        `make` creates a member's session, appends it to the list and returns its first observation.

        Raises:
            CallError: DRAINING or OVERLOADED if no session may be created. TOO_LARGE if the response cannot be sent,
                because nobody could use or close the sessions without their ids.
        """
        self.worker.admit(table, len(members))
        sessions: list[ServedSession] = []
        start = clock()
        try:
            for member in members:
                if clock() - start > SLICE_SECONDS:
                    await self.worker.share.pause(table.tenant)  # others run meanwhile
                    start = clock()
                observation = await make(member, sessions)
                sessions[-1].describe(response.sessions.add(), observation)
            limit = self._limits.max_message_bytes
            if limit and (size := response.ByteSize() + ENVELOPE_BYTES) > limit:
                raise too_large(size, limit)
        except BaseException:
            self.worker.discount(table, len(members))
            for session in sessions:
                session.host.close()
            raise
        for session in sessions:
            session.last_call = time.monotonic()
            table[session.id] = session
            self.worker.metrics.count_live(session.environment.spec.id, 1)
        return response

    async def _of_snapshot(self, work: Awaitable[R]) -> R:
        """Await work on a restored state. Raises BAD_ARGUMENT for an EnvironmentRaised if there is no snapshot key.

        Without a key, the state is untrusted, and the bug may be the state's fault.
        """
        try:
            return await work
        except EnvironmentRaised as bug:
            if self.worker.seal.keyed:
                raise
            raise bad_argument("snapshot.state", f"is not an episode of its environment: {bug}") from bug

    def _describe_created(
        self,
        response: pb.OpenResponse | pb.RestoreResponse,
        environment: type[Environment],
        instructions: str,
        limits: Limits,
        lease: float,
    ) -> None:
        """Fill in the response's fields that its sessions have in common."""
        response.environment_version = environment.spec.version
        response.instructions = instructions
        convert.fill_limits(response.limits, limits)
        response.lease_seconds = lease
        response.instance_id = self.worker.instance_id

    # --- using sessions ------------------------------------------------------------------------------------------

    async def reset(self, table: SessionTable, request: pb.ResetRequest) -> pb.ResetResponse:
        session = table.find(request.session_id)
        async with session.turn_taking():
            if (last_reply := session.earlier_reset(request)) is not None:
                return last_reply
            environment = session.environment
            plan = session.plan_episode(
                request.seed if request.HasField("seed") else None,
                request.dynamics_seed if request.HasField("dynamics_seed") else None,
            )
            if request.HasField("options"):
                plan = plan._replace(options=await self._options(environment, request.options))
            if request.HasField("want"):
                plan = plan._replace(want=self._check_want(environment, convert.want_from(request.want)))
            if request.HasField("limits"):
                plan = plan._replace(limits=convert.limits_from(request.limits, plan.limits))
            started = await self._guard(session, session.host.reset(plan), "Reset")
            session.begin_episode(plan)
            response = session.reset_response(started)
            session.last_request, session.last_reply = digest_reset(request), response.SerializeToString()
            return response

    async def step(self, table: SessionTable, request: pb.StepRequest) -> pb.StepResponse:
        session = table.find(request.session_id)
        check_actions(request.actions, self._limits)
        want = None
        if request.HasField("want"):
            want = self._check_want(session.environment, convert.want_from(request.want))
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
            raise self.worker.break_off(session, error) from error

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
            session: the session.
            epoch: epoch of the session that the caller expects.
            index: step index of the turn.
            actions: sub-actions of the turn.
            want: optional fields of the observation; None selects the session's own.

        Raises:
            CallError: the turn is out of order, the session is gone, or the environment failed.
        """
        async with session.turn_taking():
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
            return transition

    async def render(self, table: SessionTable, request: pb.RenderRequest) -> pb.RenderResponse:
        session = table.find(request.session_id)
        mode = request.mode or "text"
        if mode not in session.environment.spec.render_modes:
            modes = ", ".join(session.environment.spec.render_modes)
            raise bad_argument("mode", f"is {mode!r}; {session.environment.spec.id} renders {modes}")
        async with session.turn_taking():
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
        async with session.turn_taking():
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
        self._check_ids(request.session_ids)
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
        self._check_ids(request.session_ids)
        for session_id in request.session_ids:
            session = table.get(session_id)
            if session is not None:
                self.worker.drop(table, session)
        return pb.CloseResponse()

    # --- rules ---------------------------------------------------------------------------------------------------

    def _check_ids(self, ids: Sequence[str]) -> None:
        if len(ids) > self._limits.max_sessions:
            problem = f"has {len(ids)} entries; this server holds at most {self._limits.max_sessions} sessions"
            raise bad_argument("session_ids", problem)

    def _members(self, request: pb.OpenRequest | pb.ForkRequest | pb.RestoreRequest) -> range:
        """Return the indices, within their group, of the sessions to create. Raises BAD_ARGUMENT."""
        count = request.count or 1
        if count > self._limits.max_group:
            raise bad_argument("count", f"is {count}; this server creates at most {self._limits.max_group} at a time")
        if request.first_member + count > 2**32:
            raise bad_argument("first_member", f"is {request.first_member}; {count} places from there end beyond 2^32")
        return range(request.first_member, request.first_member + count)

    async def _options(self, environment: type[Environment], message: struct_pb2.Struct) -> EnvironmentOptions:
        """Return an environment's options. Raises BAD_ARGUMENT."""
        check_options(message, self._limits)
        values = convert.options_from(message)
        if values and environment.spec.slow_reset:
            # Validators may search as long as resets do.
            try:
                return await self.worker.pools.computing.run(functools.partial(parse_options, environment, values))
            except Hung as hung:
                raise CallError("ENVIRONMENT_BUG", f"checking the options {hung}", {"session": "intact"}) from hung
            except Busy as busy:
                raise overloaded("environment", busy.message, busy.retry_after) from busy
        return parse_options(environment, values)

    def _lease(self, seconds: float) -> float:
        if seconds != seconds or seconds < 0:
            raise bad_argument("lease_seconds", f"is {seconds}; give seconds, or 0 for the server's default")
        return min(seconds or self._limits.default_lease_seconds, self._limits.max_lease_seconds)

    def _check_want(self, environment: type[Environment], want: Want) -> Want:
        capabilities = convert.spec_to(environment).capabilities
        if want.image and "png" not in environment.spec.render_modes:
            raise unsupported(environment, "image", "does not render png")
        for name in ("expert_action", "score", "valid_actions"):
            if getattr(want, name) and not getattr(capabilities, name):
                raise unsupported(environment, name, f"has no {name}")
        return want


async def _load(host: EpisodeHost, state: bytes, rehearse: bool) -> None:
    try:
        await host.load(state, rehearse=rehearse)
    except StateError as error:
        raise bad_argument("snapshot.state", str(error)) from error


async def _observe_copy(copy: EpisodeHost, want: Want, pictures: Pictures) -> pb.Observation:
    try:
        return await copy.observe(want, pictures)
    except HostDied as death:
        raise EnvironmentRaised.of_copy(death) from death
