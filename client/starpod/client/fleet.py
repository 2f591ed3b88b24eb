"""Sessions over many servers: placement, health, leases, and recovery of what a lost server held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from starpod.client.arguments import group_size, seed_number
from starpod.client.connection import OPEN, RESTORE
from starpod.client.errors import BadArgument, Overloaded, StarpodError
from starpod.client.history import History, Opened, Restored, first_reply
from starpod.client.nearest import explain_options
from starpod.client.observation import Action, Limits, Observation, Transition, Want, as_actions
from starpod.client.pool.pool import ServerPool
from starpod.client.pool.replica import Replica
from starpod.client.recovery.hot_path import submit, submit_texts
from starpod.client.recovery.rebuild import new_key
from starpod.client.recovery.recovery import Recovery
from starpod.client.recovery.reset import PendingReset
from starpod.client.recovery.state import BatchResult, SessionState
from starpod.client.session import CLOSE_SECONDS, Session, options_struct
from starpod.client.snapshot import Snapshot
from starpod.client.transport import TLS, Backoff, Transport, as_addresses, expect_own_grpc
from starpod.v1 import environment_pb2 as pb


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
        self.pool = ServerPool(
            as_addresses(addresses),
            Transport(token, tls, max_message_bytes, keepalive_seconds),
            timeout=timeout,
            patience=patience,
            grace=grace,
            batches_in_flight=batches_in_flight,
            discover=discover,
            health_seconds=health_seconds,
        )
        self.recovery = Recovery(self.pool, enabled=recovery, patience=patience)
        self._checkpoints = checkpoints

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
        return self.pool.replicas

    @property
    def sessions(self) -> list[Session]:
        """Those that the program holds open."""
        steps = [step for replica in self.replicas for step in replica.sessions]
        return [Session(self.recovery, step) for step in steps if isinstance(step, SessionState)]

    @property
    def recoveries(self) -> int:
        """How often a session was brought back after a loss."""
        return self.recovery.recoveries

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connects. Raises Unreachable, or what the servers refused, if none of them can be used."""
        expect_own_grpc()
        self.loop = asyncio.get_running_loop()
        try:
            await self.pool.start(self.recovery)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Closes all sessions as far as their servers can be reached, then the connections. Calls in flight fail."""
        until = self.loop.time() + CLOSE_SECONDS
        closing = [
            self.loop.create_task(replica.close_sessions(ids, until))
            for replica in self.replicas
            if (ids := [*(step.session_id for step in replica.sessions), *replica.unclosed]) and replica.ready
        ]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)
        await self.recovery.close()
        await self.pool.close()

    async def describe(self) -> list[pb.EnvironmentSpec]:
        """Every environment version that is hosted now, by id, newest version first."""
        return await self.pool.describe()

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
        """A group of `count` sessions from one seed, together on one server. "sokoban" means the highest "sokoban-vN".

        Members share the start and not the luck, unless `dynamics_seed` is given. Without a seed the server draws one.
        `version` is a range such as ">=1,<2"; the newest that fits is opened. `lease_seconds` 0: the server's default.
        Raises UnknownEnvironment, UnknownVersion and BadArgument with what was probably meant.
        """
        count, seed = group_size("count", count), seed_number("seed", seed)
        dynamics_seed = seed_number("dynamics_seed", dynamics_seed)
        want = want or Want()
        until = self.loop.time() + self.recovery.patience
        backoff = Backoff()
        while True:
            replica, spec = await self.pool.choose(environment_id, version, until)
            recoverable = self.recovery.enabled and spec.capabilities.deterministic
            request = pb.OpenRequest(
                environment_id=spec.id,
                version=f"=={spec.version}",
                options=options_struct(options),
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
                response = await replica.call(OPEN, request, until)
                break
            except BadArgument as error:
                raise explain_options(error, spec, options) from None
            except StarpodError as error:
                await self._pause(error, backoff, until)
            finally:
                replica.placing -= count
        self.pool.renew_within(response.lease_seconds)
        states = []
        for message in response.sessions:
            origin = Opened(
                spec.id,
                response.environment_version,
                request.options if request.HasField("options") else None,
                message.seed,
                message.dynamics_seed,
                response.limits,
                request.want,
                lease_seconds,
            )
            states.append(self._state(replica, spec, message, response, want, origin))
        try:
            await self.recovery.checkpoint_all(states)
        except BaseException:
            for state in states:
                state.replica.close_later([state.session_id])
            raise
        return [Session(self.recovery, state) for state in states]

    async def restore(self, snapshot: Snapshot, *, want: Want | None = None, lease_seconds: float = 0.0) -> Session:
        """A session that goes on from a snapshot. Raises IncompatibleSnapshot if no hosted version takes it."""
        want = want or Want()
        until = self.loop.time() + self.recovery.patience
        backoff = Backoff()
        while True:
            replica, spec = await self.pool.choose_for(snapshot, until)
            recoverable = self.recovery.enabled and spec.capabilities.deterministic
            request = pb.RestoreRequest(
                snapshot=snapshot.to_proto(),
                key=new_key(),
                lease_seconds=lease_seconds,
                want=want.to_proto(state_key=recoverable and spec.capabilities.state_key),
            )
            try:
                response = await replica.call(RESTORE, request, until)
                break
            except StarpodError as error:
                await self._pause(error, backoff, until)
        self.pool.renew_within(response.lease_seconds)
        origin = Restored(request.snapshot, response.environment_version, request.want, lease_seconds)
        return Session(self.recovery, self._state(replica, spec, response.sessions[0], response, want, origin))

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
        texts = set(map(type, actions)) == {str}
        turns = [] if texts else [as_actions(each) for each in actions]
        result: BatchResult[Transition] = BatchResult(self.loop.create_future(), count)
        states = [session.state for session in sessions]
        if texts:
            await submit_texts(states, actions, result)  # type: ignore[arg-type]
        for slot, taken in enumerate(turns):
            if states[slot].busy:
                await states[slot].acquire()
            submit(states[slot], taken, None, result, slot)
        if not return_exceptions:
            return await result.all()
        await result.future
        return result.values

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
        struct = options_struct(options)
        requests = [pb.ResetRequest(seed=seed_number("seed", seed), options=struct) for seed in seeds]
        result: BatchResult[Observation] = BatchResult(self.loop.create_future(), count)
        for slot, (session, request) in enumerate(zip(sessions, requests, strict=True)):
            state = session.state
            if state.busy:
                await state.acquire()
            PendingReset(self.recovery, state, request, want=None, options=options, result=result, slot=slot).submit()
        return await result.all()

    async def close_sessions(self, sessions: Iterable[Session]) -> None:
        """Ends sessions, one call per server. Those of a server that is away are closed when it is back."""
        await self.recovery.close_sessions([session.state for session in sessions], CLOSE_SECONDS)

    # --- small parts -----------------------------------------------------------------------------------------------

    async def _pause(self, error: StarpodError, backoff: Backoff, until: float) -> None:
        """Before another server is asked for a session. Raises the error where that does not help."""
        if isinstance(error, Overloaded) and error.advice == "retry":
            return  # the pool waits where none has room
        if error.advice != "reopen" or self.loop.time() > until:
            raise error
        await asyncio.sleep(backoff.wait())

    def _state(
        self,
        replica: Replica,
        spec: pb.EnvironmentSpec,
        message: pb.Session,
        response: pb.OpenResponse | pb.RestoreResponse,
        want: Want,
        origin: Opened | Restored,
    ) -> SessionState:
        deterministic = spec.capabilities.deterministic
        checkpoints = self.recovery.enabled and not deterministic and self._checkpoints and spec.capabilities.snapshot
        history = None
        if self.recovery.enabled and (deterministic or checkpoints):
            first = None if checkpoints else first_reply(message.observation, response.instructions)
            history = History(origin, first)
        return SessionState(
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
