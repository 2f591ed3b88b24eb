"""Sessions over many servers: placement, health, leases, and recovery of what a lost server held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from google.protobuf import struct_pb2

from starpod.client.errors import BadArgument, Overloaded, StarpodError
from starpod.client.log import History, Opened, Reseeded, Restored, digest_observation
from starpod.client.mending import Mender
from starpod.client.nearest import explain_options
from starpod.client.observation import Action, Limits, Observation, Transition, Want, as_turn
from starpod.client.recovery import new_key
from starpod.client.replica import Replica
from starpod.client.restart import Restart
from starpod.client.roster import Roster, quiet
from starpod.client.session import CLOSED, Gather, Session
from starpod.client.snapshot import Snapshot
from starpod.client.transport import TLS, Backoff, Transport, as_addresses
from starpod.v1 import environment_pb2 as pb

CLOSE_SECONDS = 2.0


class Fleet:
    """All servers that host what a program steps, behind one object.

        async with Fleet("127.0.0.1:50051") as fleet:
            group = await fleet.open("frozen_lake-v1", seed=1, count=16)
            transitions = await fleet.step_many(group, ["Left"] * 16)

    addresses: "host:port", several of them in a list or with commas, or "dns:///name:port" for every address that
        the name has (asked again every 30 seconds). Workers that a server names as its siblings join by themselves.
    token: bearer token as text, or a Path to a file that holds it. tls: certificates.
    recovery: bring sessions of a lost server back on another one. Deterministic environments are replayed from the
        log; others go on from a snapshot.
    checkpoints: take that snapshot after every turn of an environment that is not deterministic. Without, or where it
        has none, its sessions are reported as SessionLost.
    timeout: seconds after which a call without a reply is asked again; the server does the work once.
    patience: seconds that one call may take with all retries and recoveries before it raises.
    grace: seconds that a broken connection may take to come back before its sessions are moved.
    batches_in_flight: messages per server under way before calls that are ready start to accumulate.
    discover: take siblings in. health_seconds: how often servers are asked how they are.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | Path | None = None,
        tls: TLS | None = None,
        recovery: bool = True,
        checkpoints: bool = True,
        timeout: float = 30.0,
        patience: float = 300.0,
        grace: float = 0.5,
        batches_in_flight: int = 2,
        discover: bool = True,
        health_seconds: float = 5.0,
        max_message_bytes: int = 64 * 1024 * 1024,
        keepalive_seconds: float = 20.0,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop
        self._roster = Roster(
            as_addresses(addresses),
            Transport(token, tls, max_message_bytes, keepalive_seconds),
            timeout=timeout,
            patience=patience,
            grace=grace,
            batches_in_flight=batches_in_flight,
            discover=discover,
            health_seconds=health_seconds,
        )
        self._recovery = recovery
        self._checkpoints = checkpoints
        self._patience = patience
        self._mender = Mender(self._roster, recovery=recovery, patience=patience)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Fleet({self.replicas!r})"

    @property
    def replicas(self) -> list[Replica]:
        """The servers: addresses, sessions, load, health."""
        return self._roster.replicas

    @property
    def recoveries(self) -> int:
        """How often a session was brought back after a loss."""
        return self._mender.recoveries

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connects. Raises Unreachable, or what the servers refused, if none of them can be used."""
        self.loop = asyncio.get_running_loop()
        try:
            await self._roster.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Closes all sessions as far as their servers can be reached, then the connections. Calls in flight fail."""
        until = self.loop.time() + CLOSE_SECONDS
        farewells = [
            self.loop.create_task(quiet(replica.call, "close", pb.CloseRequest(session_ids=ids), until))
            for replica in self.replicas
            if (ids := [*(session._session_id for session in replica.sessions), *replica.orphans]) and replica.ready
        ]
        if farewells:
            await asyncio.wait(farewells, timeout=CLOSE_SECONDS)
        await self._mender.close()
        await self._roster.close()

    async def describe(self) -> list[pb.EnvironmentSpec]:
        """Every environment version that is hosted now, by id, newest version first."""
        return await self._roster.describe()

    # --- sessions --------------------------------------------------------------------------------------------------

    async def open(
        self,
        environment_id: str,
        *,
        seed: int | None = None,
        dynamics_seed: int | None = None,
        count: int = 1,
        options: Mapping[str, Any] | None = None,
        want: Want | None = None,
        limits: Limits | None = None,
        version: str = "",
        lease_seconds: float = 0.0,
    ) -> list[Session]:
        """A group of `count` sessions from one seed, together on one server.

        Members share the start and not the luck, unless `dynamics_seed` is given. Without a seed the server draws one.
        `version` is a range such as ">=1,<2"; the newest that fits is opened. `lease_seconds` 0: the server's default.
        Raises UnknownEnvironment, UnknownVersion and BadArgument with what was probably meant.
        """
        want = want or Want()
        until = self.loop.time() + self._patience
        backoff = Backoff()
        while True:
            replica, spec = await self._roster.choose(environment_id, version, until)
            recoverable = self._recovery and spec.capabilities.deterministic
            request = pb.OpenRequest(
                environment_id=environment_id,
                version=f"=={spec.version}",
                options=_struct(options),
                seed=seed,
                dynamics_seed=dynamics_seed,
                count=count,
                key=new_key(),
                want=want.to_proto(state_key=recoverable and spec.capabilities.state_key),
                limits=limits.to_proto() if limits else None,
                lease_seconds=lease_seconds,
            )
            replica.placing += count
            try:
                response: pb.OpenResponse = await replica.call("open", request, until)
                break
            except BadArgument as error:
                raise explain_options(error, spec, options) from None
            except StarpodError as error:
                await self._pause(error, backoff, until)
            finally:
                replica.placing -= count
        self._roster.renew_within(response.lease_seconds)
        sessions = []
        for message in response.sessions:
            origin = Opened(
                environment_id,
                response.environment_version,
                request.options if request.HasField("options") else None,
                message.seed,
                message.dynamics_seed,
                response.limits,
                request.want,
                lease_seconds,
            )
            sessions.append(self._session(replica, spec, message, response, want, origin))
        try:
            await self._mender.checkpoint_all(sessions)
        except BaseException:
            for session in sessions:
                session._replica.orphans.append(session._session_id)
            raise
        return sessions

    async def restore(self, snapshot: Snapshot, *, want: Want | None = None, lease_seconds: float = 0.0) -> Session:
        """A session that goes on from a snapshot. Raises IncompatibleSnapshot if no hosted version takes it."""
        want = want or Want()
        until = self.loop.time() + self._patience
        backoff = Backoff()
        while True:
            replica, spec = await self._roster.choose_for(snapshot, until)
            recoverable = self._recovery and spec.capabilities.deterministic
            request = pb.RestoreRequest(
                snapshot=snapshot.to_proto(),
                key=new_key(),
                lease_seconds=lease_seconds,
                want=want.to_proto(state_key=recoverable and spec.capabilities.state_key),
            )
            try:
                response: pb.RestoreResponse = await replica.call("restore", request, until)
                break
            except StarpodError as error:
                await self._pause(error, backoff, until)
        self._roster.renew_within(response.lease_seconds)
        origin = Restored(request.snapshot, response.environment_version, request.want, lease_seconds)
        return self._session(replica, spec, response.sessions[0], response, want, origin)

    @overload
    async def step_many(
        self, sessions: Sequence[Session], actions: Sequence[Action | Iterable[Action]]
    ) -> list[Transition]: ...

    @overload
    async def step_many(
        self,
        sessions: Sequence[Session],
        actions: Sequence[Action | Iterable[Action]],
        *,
        return_exceptions: Literal[True],
    ) -> list[Transition | BaseException]: ...

    async def step_many(
        self,
        sessions: Sequence[Session],
        actions: Sequence[Action | Iterable[Action]],
        *,
        return_exceptions: bool = False,
    ) -> Any:
        """One turn in each session, together: the transitions in their order.

        An error costs its own session only. All turns are finished before the first error is raised; with
        `return_exceptions` errors stand in the list instead. Raises TypeError for what is no action before any turn.
        """
        count = len(sessions)
        if len(actions) != count:
            raise ValueError(f"{count} sessions and {len(actions)} turns: give one turn for each session.")
        if not count:
            return []
        # All of them before the first is sent: what is no action must not leave the turns half played.
        plain = set(map(type, actions)) == {str}
        turns: Sequence[Any] = actions if plain else [as_turn(action) for action in actions]
        gather = Gather(count, self.loop.create_future())
        replica: Replica | None = None
        for slot, (session, turn) in enumerate(zip(sessions, turns, strict=True)):
            if session._busy:
                await session._acquire()
                replica = None  # woken before, it has sent what was ready by then
            if session._replica is not replica:
                replica = session._replica
                replica.wake()
                ready = replica.ready_steps
            if not plain or session.closed or not replica.columns:
                session._submit((turn,) if plain else turn, None, gather, slot)
                continue
            # The hot path: what Session._submit and Replica.submit do, written out.
            session._busy = session._plain = True
            session._turn = (turn,)
            session._turn_want = None
            session._sink = gather
            session._slot = slot
            ready.append(session)
        if not return_exceptions:
            return await gather.all()
        await gather.future
        return gather.results

    async def reset(
        self,
        session: Session,
        seed: int | None,
        dynamics_seed: int | None,
        options: Mapping[str, Any] | None,
        want: Want | None,
        limits: Limits | None,
    ) -> Observation:
        """See Session.reset."""
        request = pb.ResetRequest(
            seed=seed,
            dynamics_seed=dynamics_seed,
            options=_struct(options),
            want=want.to_proto(state_key=_keyed(session)) if want else None,
            limits=limits.to_proto() if limits else None,
        )
        if session._busy:
            await session._acquire()
        future: asyncio.Future[Observation] = self.loop.create_future()
        self._restart(session, request, want, options, future, -1)
        return await future

    async def reset_many(
        self,
        sessions: Sequence[Session],
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> list[Observation]:
        """A new episode in each session, together: the first observations in their order.

        seeds: one for each; None where the server is to draw it. All resets are finished before the first error is
        raised.
        """
        count = len(sessions)
        if seeds is None:
            seeds = [None] * count
        if len(seeds) != count:
            raise ValueError(f"{count} sessions and {len(seeds)} seeds: give one seed for each session.")
        if not count:
            return []
        struct = _struct(options)
        requests = [pb.ResetRequest(seed=seed, options=struct) for seed in seeds]
        gather = Gather(count, self.loop.create_future())
        for slot, (session, request) in enumerate(zip(sessions, requests, strict=True)):
            if session._busy:
                await session._acquire()
            self._restart(session, request, None, options, gather, slot)
        return await gather.all()

    def _restart(
        self,
        session: Session,
        request: pb.ResetRequest,
        want: Want | None,
        options: Mapping[str, Any] | None,
        sink: Any,
        slot: int,
    ) -> None:
        session._busy = True
        restart = Restart(self._mender, session, request, want, options, sink, slot)
        if session.closed:
            restart._fail(RuntimeError(CLOSED))
        else:
            restart.submit()

    async def render(self, session: Session, mode: str) -> str | bytes:
        """See Session.render."""

        async def render() -> str | bytes:
            response: pb.RenderResponse = await self._mender.ask(
                session, "render", lambda: pb.RenderRequest(session_id=session._session_id, mode=mode)
            )
            return response.data.decode() if response.mime.startswith("text/") else response.data

        return await self._mender.alone(session, render)

    async def fork(self, session: Session, count: int, reseed: bool, seeds: tuple[int, ...]) -> list[Session]:
        """See Session.fork."""

        async def fork() -> list[Session]:
            response: pb.ForkResponse = await self._mender.ask(
                session,
                "fork",
                lambda: pb.ForkRequest(
                    session_id=session._session_id,
                    epoch=session._epoch,
                    step_index=session._step_index,
                    count=count,
                    randomness=pb.FORK_RANDOMNESS_RESEED if reseed else pb.FORK_RANDOMNESS_KEEP,
                    dynamics_seeds=seeds,
                    key=new_key(),
                ),
            )
            copies = []
            for message in response.sessions:
                history = session._history
                if history is not None:
                    first = (history.keys[-1], history.digests[-1])
                    if reseed:
                        # The reward of the last turn is not part of a copy's first reply.
                        observed = digest_observation(message.observation)
                        history = History(Reseeded(history.copy(), message.dynamics_seed), first[0], observed)
                    else:
                        history = history.copy()
                copy = Session(
                    self,
                    self._mender,
                    session._replica,
                    message,
                    environment_id=session.environment_id,
                    version=session.version,
                    instructions=session.instructions,
                    limits=session.limits,
                    want=session.want,
                    history=history,
                    checkpoints=session._checkpoints,
                )
                if session.done:
                    copy._last = session._last
                copies.append(copy)
            await self._mender.checkpoint_all(copies)
            return copies

        return await self._mender.alone(session, fork)

    async def snapshot(self, session: Session) -> Snapshot:
        """See Session.snapshot."""

        async def snapshot() -> Snapshot:
            response: pb.SnapshotResponse = await self._mender.ask(
                session, "snapshot", lambda: pb.SnapshotRequest(session_id=session._session_id)
            )
            return Snapshot.from_proto(response.snapshot)

        return await self._mender.alone(session, snapshot)

    async def close_sessions(self, sessions: Iterable[Session]) -> None:
        """Ends sessions, one call per server. One that cannot be reached lets them go when their leases run out."""
        by_replica: dict[Replica, list[str]] = {}
        for session in sessions:
            await session._acquire()
            if not session.closed:
                session.closed = True
                session._replica.sessions.discard(session)
                by_replica.setdefault(session._replica, []).append(session._session_id)
            session._release()
        until = self.loop.time() + CLOSE_SECONDS
        await asyncio.gather(
            *(
                quiet(replica.call, "close", pb.CloseRequest(session_ids=ids), until)
                for replica, ids in by_replica.items()
                if replica.ready
            )
        )

    # --- small parts -----------------------------------------------------------------------------------------------

    async def _pause(self, error: StarpodError, backoff: Backoff, until: float) -> None:
        """Before another server is asked for a session. Raises the error where that does not help."""
        if isinstance(error, Overloaded) and error.advice == "retry":
            return  # The roster waits where none has room.
        if error.advice != "reopen" or self.loop.time() > until:
            raise error
        await asyncio.sleep(backoff.wait())

    def _session(
        self,
        replica: Replica,
        spec: pb.EnvironmentSpec,
        message: pb.Session,
        response: pb.OpenResponse | pb.RestoreResponse,
        want: Want,
        origin: Opened | Restored,
    ) -> Session:
        deterministic = spec.capabilities.deterministic
        checkpoints = self._recovery and not deterministic and self._checkpoints and spec.capabilities.snapshot
        history = None
        if self._recovery and (deterministic or checkpoints):
            digest = None if checkpoints else digest_observation(message.observation)
            history = History(origin, message.observation.state_key, digest)
        return Session(
            self,
            self._mender,
            replica,
            message,
            environment_id=spec.id,
            version=response.environment_version,
            instructions=response.instructions,
            limits=Limits.from_proto(response.limits),
            want=want,
            history=history,
            checkpoints=checkpoints,
        )


def _keyed(session: Session) -> bool:
    return session._history is not None and session._history.root.want.state_key


def _struct(options: Mapping[str, Any] | None) -> struct_pb2.Struct | None:
    if options is None:
        return None
    struct = struct_pb2.Struct()
    try:
        struct.update(dict(options))
    except (TypeError, ValueError) as error:
        raise BadArgument(f"Options must be JSON values: {error}", violations=[("options", str(error))]) from None
    return struct
