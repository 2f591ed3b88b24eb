"""Calls that create sessions: Open, Fork and Restore. Each creates a whole group or nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starpod.env_server.authoring.environment import Environment, Limits, derive_seed
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import EnvironmentRaised, bad_argument, unsupported
from starpod.env_server.episodes.live_episode import ObservedState, Pictures, SavedEpisode, Want
from starpod.env_server.episodes.state import StateError
from starpod.env_server.episodes.timing import clock
from starpod.env_server.operation.tenants import SLICE_SECONDS
from starpod.env_server.processes.hosts import EpisodeHost, HostDied, LocalHost, ResetPlan
from starpod.env_server.sessions.requests import lease_of, members_of, snapshot_too_large, wanted
from starpod.env_server.sessions.responses import ENVELOPE_BYTES, too_large
from starpod.env_server.sessions.seal import digest_snapshot
from starpod.env_server.sessions.session import ServedSession
from starpod.env_server.sessions.table import Created, SessionTable
from starpod.env_server.sessions.worker import Worker
from starpod.v1 import environment_pb2 as pb

R = TypeVar("R")
Make = Callable[[int, list[ServedSession]], Awaitable[pb.Observation | ObservedState]]
"""Function that creates a member's session, appends it to the list and returns its first observation."""


class SessionCreation:
    """The calls that create sessions. Each method returns the reply to its request."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._limits = worker.limits
        self._guard = worker.failures.guard

    async def open(self, table: SessionTable, request: pb.OpenRequest) -> pb.OpenResponse:
        environment = self._worker.registry.find(request.environment_id, request.version)
        members = members_of(request, self._limits)
        options = await self._worker.read_options(environment, request.options)
        limits = convert.limits_from(request.limits, environment.spec.limits)
        want = wanted(environment, request.want)
        lease = lease_of(request, self._limits)
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
            host = self._worker.hosts.new(environment, want)
            session = ServedSession(environment, host, plan, lease, member)
            sessions.append(session)
            can_copy = environment.spec.slow_reset and environment.spec.fork
            if first_host is not None and can_copy and isinstance(host, LocalHost):
                # The start depends only on the seed, so the other members copy the first one instead of repeating a
                # slow reset.
                session.host = await self._guard(session, first_host.fork(plan.dynamics_seed), "Open")
                host.close()
                return await self._guard(session, session.host.observe(want, pictures), "Open")
            started = await self._guard(session, host.reset(plan._replace(pictures=pictures)), "Open")
            first_host = host if isinstance(host, LocalHost) else None
            if not sessions[1:]:
                self._describe(response, environment, started.instructions, limits, lease)
            return started.observation

        return await self._create(table, members, response, make)

    async def fork(self, table: SessionTable, request: pb.ForkRequest) -> pb.ForkResponse:
        parent = table.find(request.session_id)
        if not parent.environment.spec.fork:
            raise unsupported(parent.environment, "fork", "cannot be copied in the middle of an episode")
        reseed = request.randomness == pb.FORK_RANDOMNESS_RESEED
        if request.randomness not in pb.ForkRandomness.values():
            raise bad_argument("randomness", f"is {request.randomness}; use KEEP or RESEED")
        seeds = list(request.dynamics_seeds)
        members = members_of(request, self._limits)
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
            self._worker.hosts.make_room(parent.environment)
            host = await self._guard(parent, parent.host.fork(plan.dynamics_seed if reseed else None), "Fork")
            turns, is_over = parent.next_index, parent.over
            sessions.append(ServedSession(parent.environment, host, plan, parent.lease, member, turns, is_over))
            return await self._guard(parent, _observe_copy(host, plan.want, pictures), "Fork")

        async with parent:
            parent.check()
            if (request.epoch, request.step_index) != (parent.epoch, parent.next_index):
                raise parent.out_of_order(request.epoch, request.step_index)
            pictures: Pictures = {}
            return await self._create(table, members, pb.ForkResponse(), make)

    async def restore(self, table: SessionTable, request: pb.RestoreRequest) -> pb.RestoreResponse:
        snapshot, members = request.snapshot, members_of(request, self._limits)
        if len(snapshot.state) > self._limits.max_snapshot_bytes:
            raise snapshot_too_large(len(snapshot.state), self._limits)
        if digest_snapshot(snapshot.environment_id, snapshot.environment_version, snapshot.state) != snapshot.digest:
            raise bad_argument("snapshot.digest", "does not match the snapshot: it was cut, changed or mixed up")
        environment = self._worker.registry.find_restorer(snapshot.environment_id, snapshot.environment_version)
        if not environment.spec.snapshot:
            raise unsupported(environment, "snapshot", "has no state that could be restored")
        want = wanted(environment, request.want)
        lease = lease_of(request, self._limits)
        try:
            state = self._worker.seal.unseal(snapshot.environment_id, snapshot.environment_version, snapshot.state)
            # The session needs seeds, options and limits here. The rest is read where the episode will run.
            episode = SavedEpisode.read(environment, state)
        except StateError as error:
            raise bad_argument("snapshot.state", str(error)) from error
        plan = ResetPlan(episode.options, episode.limits, episode.seed, episode.dynamics_seed, want)
        response = pb.RestoreResponse()
        pictures: Pictures = {}

        async def make(member: int, sessions: list[ServedSession]) -> pb.Observation:
            host = self._worker.hosts.new(environment, want)
            session = ServedSession(environment, host, plan, lease, member, episode.turns, bool(episode.end_reason))
            load = _load(host, state, rehearse=not (self._worker.seal.keyed or sessions))
            sessions.append(session)
            instructions = await self._guard(session, self._of_snapshot(load), "Restore")
            observation = await self._guard(session, self._of_snapshot(host.observe(want, pictures)), "Restore")
            if not sessions[1:]:
                self._describe(response, environment, instructions, episode.limits, lease)
            return observation

        return await self._create(table, members, response, make)

    async def _create(self, table: SessionTable, members: range, response: Created, make: Make) -> Created:
        """Create all sessions of a group or none, and add them to the response.

        `make` creates a member's session, appends it to the list and returns its first observation.

        Raises:
            CallError: DRAINING or OVERLOADED if no session may be created. TOO_LARGE if the response cannot be sent,
                because nobody could use or close the sessions without their ids.
        """
        self._worker.admit(table, len(members))
        sessions: list[ServedSession] = []
        start = clock()
        try:
            for member in members:
                if clock() - start > SLICE_SECONDS:
                    await self._worker.share.pause(table.tenant)  # others run meanwhile
                    start = clock()
                observation = await make(member, sessions)
                sessions[-1].describe(response.sessions.add(), observation)
            limit = self._limits.max_message_bytes
            if limit and (size := response.ByteSize() + ENVELOPE_BYTES) > limit:
                raise too_large(size, limit)
        except BaseException:
            self._worker.discount(table, len(members))
            for session in sessions:
                session.host.close()
            raise
        for session in sessions:
            session.last_call = time.monotonic()
            table[session.id] = session
            self._worker.metrics.count_live(session.environment.spec.id, 1)
        return response

    async def _of_snapshot(self, work: Awaitable[R]) -> R:
        """Await work on a restored state. Raises BAD_ARGUMENT for a StateError.

        It does so for an EnvironmentRaised, too, if there is no snapshot key: the state is untrusted then, and the bug
        may be its fault.
        """
        try:
            return await work
        except StateError as error:
            raise bad_argument("snapshot.state", str(error)) from error
        except EnvironmentRaised as bug:
            if self._worker.seal.keyed:
                raise
            raise bad_argument("snapshot.state", f"is not an episode of its environment: {bug}") from bug

    def _describe(
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
        response.instance_id = self._worker.instance_id


async def _load(host: EpisodeHost, state: bytes, rehearse: bool) -> str:
    try:
        return await host.load(state, rehearse=rehearse)
    except StateError as error:
        raise bad_argument("snapshot.state", str(error)) from error


async def _observe_copy(copy: EpisodeHost, want: Want, pictures: Pictures) -> pb.Observation:
    try:
        return await copy.observe(want, pictures)
    except HostDied as death:
        raise EnvironmentRaised.of_copy(death) from death
