"""What each call of the contract does. Knows messages and sessions, but no connection: unary and stream share it."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from google.protobuf import struct_pb2

from starpod.env_server import convert
from starpod.env_server.config import ServerLimits
from starpod.env_server.environment import (
    Busy,
    Concurrency,
    Environment,
    EnvironmentOptions,
    Limits,
    OptionsError,
    Unavailable,
)
from starpod.env_server.episode import EpisodeOver, Pictures, SavedEpisode, Transition, Want
from starpod.env_server.errors import CallError, bad_argument, overloaded
from starpod.env_server.hosts import EnvironmentBug, Host, HostDied, LocalHost, Pools, ResetPlan, StateTooLarge
from starpod.env_server.limits import SLICE_SECONDS, LoopShare
from starpod.env_server.metrics import Metrics
from starpod.env_server.process_host import ProcessHost
from starpod.env_server.registry import Registry
from starpod.env_server.requests import check_actions, check_options, snapshot_too_large
from starpod.env_server.responses import ENVELOPE_BYTES, too_large
from starpod.env_server.rules import (
    describe_session,
    digest_actions,
    digest_snapshot,
    out_of_order,
    parse_options,
    replay_reply,
    unsupported,
)
from starpod.env_server.sandbox import UNTRUSTING, Sandbox
from starpod.env_server.seal import SnapshotSeal
from starpod.env_server.seeding import derive_seed
from starpod.env_server.session import Session, SessionTable, digest_request
from starpod.env_server.state import StateError
from starpod.env_server.threads import Hung
from starpod.env_server.timing import clock
from starpod.v1 import environment_pb2 as pb

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5


class Calls:
    """The verbs of the contract on this process's sessions. One event loop, no locks but the sessions' own."""

    def __init__(
        self,
        registry: Registry,
        limits: ServerLimits,
        metrics: Metrics,
        threads: int,
        sandbox: Sandbox = UNTRUSTING,
        seal: SnapshotSeal | None = None,
        thread_seconds: float = 600.0,
    ) -> None:
        self.registry = registry
        self.limits = limits
        self.metrics = metrics
        self.sandbox = sandbox
        self.seal = seal or SnapshotSeal()
        self.instance_id = secrets.token_hex(8)
        self.draining = False
        self.live_sessions = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.share = LoopShare()
        self.large_bytes = 0
        self._pools = Pools.of(threads, thread_seconds)

    # --- creating sessions ---------------------------------------------------------------------------------------

    async def open(self, table: SessionTable, request: pb.OpenRequest) -> pb.OpenResponse:
        return await table.once(request.key, request, pb.OpenResponse, functools.partial(self._open, table, request))

    async def _open(self, table: SessionTable, request: pb.OpenRequest) -> pb.OpenResponse:
        environment = self.registry.find(request.environment_id, request.version)
        members = self._members(request)
        options = await self._options(environment, request.options)
        limits = convert.limits_from(request.limits, environment.spec.limits)
        want = self._check_want(environment, convert.want_from(request.want))
        lease = self._lease(request.lease_seconds)
        seed = request.seed if request.HasField("seed") else secrets.randbits(48)
        response = pb.OpenResponse()
        async with _Cleanup(self, table, members) as created:
            first: LocalHost | None = None
            pictures: Pictures = {}
            for member in created.members:
                await created.pause()
                dynamics_seed = (
                    request.dynamics_seed if request.HasField("dynamics_seed") else derive_seed(seed, "member", member)
                )
                host = self._host(environment, want)
                session = Session(environment, host, options, limits, want, lease, member, seed, dynamics_seed)
                created.add(session)
                if first is not None and environment.spec.slow_reset and isinstance(host, LocalHost):
                    # The start depends on the seed alone, so members of a group copy the first one's search.
                    session.host = host = await self._guard(session, first.fork(dynamics_seed), "Open")
                    observation = await self._guard(session, host.observe(want, pictures), "Open")
                else:
                    plan = ResetPlan(options, limits, seed, dynamics_seed, want, pictures)
                    observation, instructions = await self._guard(session, host.reset(plan), "Open")
                    first = host if isinstance(host, LocalHost) else None
                describe_session(response.sessions.add(), session, observation)
            self._describe_created(response, environment, instructions, limits, lease)
            created.keep(response)
        return response

    async def fork(self, table: SessionTable, request: pb.ForkRequest) -> pb.ForkResponse:
        return await table.once(request.key, request, pb.ForkResponse, functools.partial(self._fork, table, request))

    async def _fork(self, table: SessionTable, request: pb.ForkRequest) -> pb.ForkResponse:
        original = table.find(request.session_id)
        if not original.environment.spec.fork:
            raise unsupported(original.environment, "fork", "cannot be copied in the middle of an episode")
        reseed = request.randomness == pb.FORK_RANDOMNESS_RESEED
        if request.randomness not in pb.ForkRandomness.values():
            raise bad_argument("randomness", f"is {request.randomness}; use KEEP or RESEED")
        seeds = list(request.dynamics_seeds)
        members = self._members(request)
        if seeds and not reseed:
            raise bad_argument("dynamics_seeds", "are only used with randomness RESEED")
        if seeds and len(seeds) != len(members):
            raise bad_argument("dynamics_seeds", f"has {len(seeds)} entries for {len(members)} copies")
        async with original.turn_taking():
            original.check()
            if (request.epoch, request.step_index) != (original.epoch, original.next_index):
                raise out_of_order(original, request.epoch, request.step_index)
            response = pb.ForkResponse()
            pictures: Pictures = {}
            async with _Cleanup(self, table, members) as created:
                for place, member in enumerate(members):
                    await created.pause()
                    dynamics_seed = original.dynamics_seed
                    if reseed:
                        dynamics_seed = (
                            seeds[place]
                            if seeds
                            else derive_seed(original.dynamics_seed, "fork", original.next_index, member)
                        )
                    self._make_room(original.environment)
                    host = await self._guard(original, original.host.fork(dynamics_seed if reseed else None), "Fork")
                    session = Session(
                        original.environment,
                        host,
                        original.options,
                        original.limits,
                        original.want,
                        original.lease,
                        member,
                        original.seed,
                        dynamics_seed,
                    )
                    session.next_index, session.over = original.next_index, original.over
                    created.add(session)
                    observation = await self._guard(original, _observe_copy(host, session.want, pictures), "Fork")
                    describe_session(response.sessions.add(), session, observation)
                created.keep(response)
        return response

    async def restore(self, table: SessionTable, request: pb.RestoreRequest) -> pb.RestoreResponse:
        return await table.once(
            request.key, request, pb.RestoreResponse, functools.partial(self._restore, table, request)
        )

    async def _restore(self, table: SessionTable, request: pb.RestoreRequest) -> pb.RestoreResponse:
        snapshot, members = request.snapshot, self._members(request)
        if len(snapshot.state) > self.limits.max_snapshot_bytes:
            raise snapshot_too_large(len(snapshot.state), self.limits)
        if digest_snapshot(snapshot.environment_id, snapshot.environment_version, snapshot.state) != snapshot.digest:
            raise bad_argument("snapshot.digest", "does not match the snapshot: it was cut, changed or mixed up")
        environment = self.registry.find_restorer(snapshot.environment_id, snapshot.environment_version)
        if not environment.spec.snapshot:
            raise unsupported(environment, "snapshot", "has no state that could be restored")
        want = self._check_want(environment, convert.want_from(request.want))
        lease = self._lease(request.lease_seconds)
        try:
            state = self.seal.open(snapshot.environment_id, snapshot.environment_version, snapshot.state)
            # Seeds, options and limits belong to the session. The rest is read where the episode will run.
            saved = SavedEpisode.read(environment, state)
        except StateError as error:
            raise bad_argument("snapshot.state", str(error)) from error
        response = pb.RestoreResponse()
        pictures: Pictures = {}
        async with _Cleanup(self, table, members) as created:
            for member in created.members:
                await created.pause()
                host = self._host(environment, want)
                session = Session(
                    environment,
                    host,
                    saved.options,
                    saved.limits,
                    want,
                    lease,
                    member,
                    saved.seed,
                    saved.dynamics_seed,
                )
                session.next_index, session.over = saved.turns, bool(saved.end_reason)
                created.add(session)
                await self._guard(session, self._of_snapshot(_load(host, state)), "Restore")
                observation = await self._guard(session, self._of_snapshot(host.observe(want, pictures)), "Restore")
                describe_session(response.sessions.add(), session, observation)
            first = created.sessions[0]
            instructions = await self._guard(first, self._of_snapshot(first.host.instructions()), "Restore")
            self._describe_created(response, environment, instructions, saved.limits, lease)
            created.keep(response)
        return response

    async def _of_snapshot(self, work: Awaitable[Any]) -> Any:
        """What an environment trips over in a state that anybody may have made is the state's fault, not its bug."""
        try:
            return await work
        except EnvironmentBug as bug:
            if self.seal.keyed:
                raise
            raise bad_argument("snapshot.state", f"is no episode of its environment: {bug}") from bug

    def _describe_created(
        self,
        response: pb.OpenResponse | pb.RestoreResponse,
        environment: type[Environment],
        instructions: str,
        limits: Limits,
        lease: float,
    ) -> None:
        """What the sessions of a reply have in common."""
        response.environment_version = environment.spec.version
        response.instructions = instructions
        convert.fill_limits(response.limits, limits)
        response.lease_seconds = lease
        response.instance_id = self.instance_id

    # --- using sessions ------------------------------------------------------------------------------------------

    async def reset(self, table: SessionTable, request: pb.ResetRequest) -> pb.ResetResponse:
        session = table.find(request.session_id)
        async with session.turn_taking():
            session.check()
            digest = digest_request(request)
            if request.epoch != session.epoch:
                repeated = request.epoch == session.epoch - 1 and session.next_index == 0
                if repeated and isinstance(session.last_reply, bytes) and session.last_request == digest:
                    return pb.ResetResponse.FromString(session.last_reply)
                raise out_of_order(session, request.epoch, session.next_index)
            environment = session.environment
            options = session.options
            if request.HasField("options"):
                options = await self._options(environment, request.options)
            want = session.want
            if request.HasField("want"):
                want = self._check_want(environment, convert.want_from(request.want))
            limits = convert.limits_from(request.limits, session.limits)
            seed = request.seed if request.HasField("seed") else secrets.randbits(48)
            dynamics_seed = (
                request.dynamics_seed
                if request.HasField("dynamics_seed")
                else derive_seed(seed, "member", session.member)
            )
            plan = ResetPlan(options, limits, seed, dynamics_seed, want)
            observation, instructions = await self._guard(session, session.host.reset(plan), "Reset")
            session.options, session.limits, session.want = options, limits, want
            session.seed, session.dynamics_seed = seed, dynamics_seed
            session.epoch += 1
            session.next_index = 0
            session.over = False
            response = pb.ResetResponse(instructions=instructions)
            describe_session(response.session, session, observation)
            convert.fill_limits(response.limits, limits)
            session.last_request, session.last_reply = digest, response.SerializeToString()
            return response

    async def step(self, table: SessionTable, request: pb.StepRequest) -> pb.StepResponse:
        session = table.find(request.session_id)
        check_actions(request.actions, self.limits)
        want = None
        if request.HasField("want"):
            want = self._check_want(session.environment, convert.want_from(request.want))
        transition = await self.turn(session, request.epoch, request.step_index, request.actions, want)
        response = pb.StepResponse(next_step_index=request.step_index + 1)
        self.write_transition(response.transition, session, transition)
        return response

    def write_transition(
        self, message: pb.Transition, session: Session, transition: Transition | pb.Transition
    ) -> None:
        """Writes into an empty message. Raises ENVIRONMENT_BUG, and the session is lost, if it cannot be written."""
        try:
            convert.fill_transition(message, transition)
        except Exception as error:
            raise self.break_off(session, error) from error

    async def turn(
        self,
        session: Session,
        epoch: int,
        index: int,
        actions: Sequence[pb.Action | str],
        want: Want | None,
    ) -> Transition | pb.Transition:
        """One turn, exactly once: what was answered to the same index and actions is answered again."""
        async with session.turn_taking():
            session.check()
            if epoch != session.epoch or index != session.next_index:
                return replay_reply(session, epoch, index, actions)
            if session.over:
                raise out_of_order(session, epoch, index)
            given = convert.actions_from(actions)
            started = time.perf_counter()
            transition: Transition | pb.Transition = await self._guard(
                session, session.host.turn(given, want or session.want), "Step"
            )
            self.metrics.step(session.environment.spec.id, time.perf_counter() - started)
            session.next_index = index + 1
            session.over = bool(transition.end_reason)
            if isinstance(transition, Transition) and not transition.plain:
                message = pb.Transition()
                self.write_transition(message, session, transition)
                transition = message
            session.last_request = digest_actions(actions)
            session.last_reply = transition if isinstance(transition, Transition) else transition.SerializeToString()
            return transition

    async def render(self, table: SessionTable, request: pb.RenderRequest) -> pb.RenderResponse:
        session = table.find(request.session_id)
        mode = request.mode or "text"
        if mode not in session.environment.spec.render_modes:
            known = ", ".join(session.environment.spec.render_modes)
            raise bad_argument("mode", f"is {mode!r}; {session.environment.spec.id} renders {known}")
        async with session.turn_taking():
            session.check()
            picture = await self._guard(session, session.host.render(mode), "Render")
        if isinstance(picture, bytes):
            return pb.RenderResponse(mime="image/png", data=picture)
        kind = "text/html" if mode == "html" else "text/plain"
        return pb.RenderResponse(mime=f"{kind}; charset=utf-8", data=picture.encode())

    async def snapshot(self, table: SessionTable, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        session = table.find(request.session_id)
        if not session.environment.spec.snapshot:
            raise unsupported(session.environment, "snapshot", "has no state that could be saved")
        async with session.turn_taking():
            session.check()
            spec = session.environment.spec
            state = await self._guard(session, session.host.save(), "Snapshot")
            state = self.seal.close(spec.id, spec.version, state)
            if len(state) > self.limits.max_snapshot_bytes:
                raise snapshot_too_large(len(state), self.limits)
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
        missing = []
        for session_id in request.session_ids:
            session = table.get(session_id)
            if session is None or session.lost:
                missing.append(session_id)
            else:
                session.touched = now
        return pb.RenewResponse(missing=missing)

    async def close(self, table: SessionTable, request: pb.CloseRequest) -> pb.CloseResponse:
        self._check_ids(request.session_ids)
        for session_id in request.session_ids:
            session = table.get(session_id)
            if session is not None:
                self.drop(table, session)
        return pb.CloseResponse()

    def drop(self, table: SessionTable, session: Session) -> None:
        """Takes a session out of the table and frees what it holds, once the calls that came before are done.

        Nobody waits for that: one of them may hang. Harmless to repeat.
        """
        if table.pop(session.id, None) is not None:
            self.discount(table, 1)
            self.metrics.live(session.environment.spec.id, -1)
            if not session.pending:
                session.close()
                return
            task = asyncio.get_running_loop().create_task(_close_in_turn(session))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def extend_leases(self, tables: Sequence[SessionTable], seconds: float) -> None:
        """For the time in which this process stood still, and nobody could renew anything."""
        now = time.monotonic()
        for table in tables:
            for session in table.values():
                session.touched = min(now, session.touched + seconds)

    def reap(self, tables: Sequence[SessionTable]) -> int:
        """Drops sessions whose lease ran out; returns how many."""
        now = time.monotonic()
        count = 0
        for table in tables:
            for session in table.expired(now):
                self.metrics.reaped(session.environment.spec.id)
                self.drop(table, session)
                count += 1
            table.forget_reservations(now)
        return count

    def shut_down(self, tables: Sequence[SessionTable]) -> None:
        """Drops every session."""
        for table in tables:
            for session in list(table.values()):
                self.drop(table, session)
        self._pools.shut_down()

    # --- rules ---------------------------------------------------------------------------------------------------

    def admit(self, table: SessionTable, count: int) -> None:
        """Counts sessions to be made, all at once: others may be in the making. Raises DRAINING or OVERLOADED."""
        if self.draining:
            raise CallError("DRAINING", "this server is going away and takes no new sessions; use another one")
        if self.live_sessions + count > self.limits.max_sessions:
            raise overloaded(
                "max_sessions",
                f"{self.live_sessions} of {self.limits.max_sessions} sessions are in use; "
                "close some, try again later or use another server",
                _RETRY_SECONDS,
            )
        table.tenant.check_sessions(count)
        self.discount(table, -count)

    def discount(self, table: SessionTable, count: int) -> None:
        """So many sessions are gone, or were never made."""
        self.live_sessions -= count
        table.tenant.sessions -= count

    def check_in_flight(self) -> None:
        """Raises OVERLOADED if as many calls are being worked on as may be."""
        limit = self.limits.max_calls_in_flight
        if self.metrics.calls_in_flight >= limit:
            raise overloaded("max_calls_in_flight", f"{limit} calls are being worked on; try again later", 0.1)

    def _check_ids(self, ids: Sequence[str]) -> None:
        if len(ids) > self.limits.max_sessions:
            problem = f"has {len(ids)} entries; this server holds at most {self.limits.max_sessions} sessions"
            raise bad_argument("session_ids", problem)

    def _members(self, request: pb.OpenRequest | pb.ForkRequest | pb.RestoreRequest) -> range:
        """The places in their group of the sessions to create. Raises BAD_ARGUMENT."""
        count = request.count or 1
        if count > self.limits.max_group:
            raise bad_argument("count", f"is {count}; this server creates at most {self.limits.max_group} at a time")
        if request.first_member + count > 2**32:
            raise bad_argument("first_member", f"is {request.first_member}; {count} places from there end beyond 2^32")
        return range(request.first_member, request.first_member + count)

    async def _options(self, environment: type[Environment], message: struct_pb2.Struct) -> EnvironmentOptions:
        """The options of an environment. Raises BAD_ARGUMENT."""
        check_options(message, self.limits)
        values = convert.options_from(message)
        if values and environment.spec.slow_reset:
            # Its validators may search as long as its resets do.
            try:
                return await self._pools.computing.run(functools.partial(parse_options, environment, values))
            except Hung as hung:
                raise CallError("ENVIRONMENT_BUG", f"checking the options {hung}", {"session": "intact"}) from hung
            except Busy as busy:
                raise overloaded("environment", busy.message, busy.retry_after) from busy
        return parse_options(environment, values)

    def _lease(self, asked: float) -> float:
        if asked != asked or asked < 0:
            raise bad_argument("lease_seconds", f"is {asked}; give seconds, or 0 for the server's default")
        return min(asked or self.limits.default_lease_seconds, self.limits.max_lease_seconds)

    def _host(self, environment: type[Environment], want: Want) -> Host:
        self._make_room(environment)
        if environment.spec.concurrency is Concurrency.PROCESS:
            return ProcessHost(environment, self.sandbox)
        return LocalHost(environment, self._pools, want)

    def _make_room(self, environment: type[Environment]) -> None:
        if environment.spec.concurrency is Concurrency.PROCESS and ProcessHost.alive >= self.limits.max_processes:
            raise overloaded(
                "max_processes", f"all {self.limits.max_processes} environment processes are in use", _RETRY_SECONDS
            )

    def _check_want(self, environment: type[Environment], want: Want) -> Want:
        capabilities = convert.spec_to(environment).capabilities
        if want.image and "png" not in environment.spec.render_modes:
            raise unsupported(environment, "image", "does not render png")
        for name in ("expert_action", "score", "valid_actions"):
            if getattr(want, name) and not getattr(capabilities, name):
                raise unsupported(environment, name, f"has no {name}")
        return want

    async def _guard(self, session: Session, work: Awaitable[Any], verb: str) -> Any:
        """Awaits the environment's own work and turns its failures into errors of the contract."""
        try:
            return await work
        except EpisodeOver:
            raise out_of_order(session, session.epoch, session.next_index) from None
        except OptionsError as error:
            raise bad_argument("options", str(error)) from error
        except Busy as busy:
            raise overloaded("environment", busy.message, busy.retry_after) from busy
        except Unavailable as missing:
            raise unsupported(session.environment, "render", f"cannot draw here: {missing}") from missing
        except StateError as error:
            raise unsupported(session.environment, "snapshot", str(error)) from error
        except StateTooLarge as error:
            raise CallError("TOO_LARGE", f"the state has {error}", {"limit": "max_snapshot_bytes"}) from error
        except HostDied as death:
            kind = "process" if session.environment.spec.concurrency is Concurrency.PROCESS else "thread"
            session.lose(f"its environment {kind} {death}")
            self.metrics.lost(session.environment.spec.id)
            logger.warning("session lost", extra={"session": session.id, "verb": verb, "cause": session.lost})
            session.check()
        except EnvironmentBug as bug:
            raise self._bug(session, bug, verb) from bug

    def break_off(self, session: Session, error: Exception | SystemExit) -> CallError:
        """ENVIRONMENT_BUG about a Step that broke, or that cannot be told though it was played: the session is lost."""
        bug = EnvironmentBug.from_exception(error, intact=False)
        bug.__cause__ = error
        return self._bug(session, bug, "Step")

    def _bug(self, session: Session, bug: EnvironmentBug, verb: str) -> CallError:
        """ENVIRONMENT_BUG; gives the session up if its state can no longer be trusted."""
        logger.error("environment bug: %s", bug, extra={"session": session.id, "verb": verb}, exc_info=bug.__cause__)
        if not bug.intact and not session.lost:
            session.lose(f"{bug} in {verb}")
            self.metrics.lost(session.environment.spec.id)
        return CallError(
            "ENVIRONMENT_BUG",
            f"{session.environment.spec.id}: {verb} raised {bug}" + ("" if bug.intact else "; the session is lost"),
            {"session": "intact" if bug.intact else "lost", "exception": bug.exception},
        )

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Holds on to a call whose caller may go away: what was begun is finished, and in flight until it is."""
        self._tasks.add(task)
        self.metrics.calls_in_flight += 1
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.metrics.calls_in_flight -= 1

    def as_call_error(self, error: Exception) -> CallError:
        """The error as the contract has it; anything unforeseen is a bug of the server and is logged."""
        if isinstance(error, CallError):
            return error
        logger.error("server bug: %r", error, exc_info=error)
        return CallError("SERVER_BUG", f"the server has a bug: {type(error).__name__}; its log tells more")


async def _close_in_turn(session: Session) -> None:
    async with session.turn_taking():
        session.close()


async def _load(host: Host, state: bytes) -> None:
    try:
        await host.load(state)
    except StateError as error:
        raise bad_argument("snapshot.state", str(error)) from error


async def _observe_copy(copy: Host, want: Want, pictures: Pictures) -> Any:
    try:
        return await copy.observe(want, pictures)
    except HostDied as death:
        raise EnvironmentBug.of_copy(death) from death


class _Cleanup:
    """Sessions in the making: all of them are kept, or none is. Raises DRAINING or OVERLOADED if none may be made."""

    def __init__(self, calls: Calls, table: SessionTable, members: range) -> None:
        self._calls = calls
        self._table = table
        self._kept = False
        self.members = members
        self.sessions: list[Session] = []
        self._began = clock()
        calls.admit(table, len(members))

    def add(self, session: Session) -> None:
        self.sessions.append(session)

    async def pause(self) -> None:
        """Lets others have the event loop, if this call has had it for long."""
        if clock() - self._began > SLICE_SECONDS:
            await self._calls.share.pause(self._table.tenant)
            self._began = clock()

    def keep(self, response: pb.OpenResponse | pb.ForkResponse | pb.RestoreResponse) -> None:
        """Raises TOO_LARGE if the reply that names them cannot travel: nobody could ever use or close them."""
        limit = self._calls.limits.max_message_bytes
        if limit and (size := response.ByteSize() + ENVELOPE_BYTES) > limit:
            raise too_large(size, limit)
        for session in self.sessions:
            session.touched = time.monotonic()
            self._table[session.id] = session
            self._calls.metrics.live(session.environment.spec.id, 1)
        self._kept = True

    async def __aenter__(self) -> _Cleanup:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not self._kept:
            self._calls.discount(self._table, len(self.members))
            for session in self.sessions:
                session.host.close()
