"""Fleet, the entry point of the client: opens sessions on many servers and recovers the sessions of a lost server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from starpod.client.arguments import group_size, seed_number
from starpod.client.errors import BadArgument, OutOfOrder, ReplayDiverged, StarpodError
from starpod.client.observation import Limits, Observation, Transition, Want, as_actions
from starpod.client.opening import Opener
from starpod.client.path import EpisodePath, PathTurn, Reseeding
from starpod.client.pool.pool import ServerPool
from starpod.client.pool.replica import Replica
from starpod.client.recovery.hot_path import submit, submit_texts
from starpod.client.recovery.recovery import Recovery
from starpod.client.recovery.reset import PendingReset
from starpod.client.recovery.state import BatchResult, SessionState
from starpod.client.session import CLOSE_SECONDS, Session, SessionProperties, options_struct
from starpod.client.snapshot import Snapshot
from starpod.client.transport import TLS, Transport, as_addresses, expect_own_grpc, note_fleet
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import Action

RECORDED = "The options or the version differ, or the environment is not deterministic."


class Fleet:
    """A group of environment servers. Sessions are opened on the least loaded server that hosts the environment.

    Example:
        async with Fleet("127.0.0.1:50051") as fleet:
            group = await fleet.open("frozen_lake-v1", seed=1, count=16)
            transitions = await fleet.step_many(group, ["Left"] * 16)

    Args:
        addresses: "host:port", several of them as a list or separated by commas, or "dns:///name:port" for all
            addresses of a name, which is resolved again every 30 seconds.
        token: bearer token, or the Path of the file that contains it.
        tls: certificates; None connects without TLS.
        recovery: recover sessions of a lost server on another one. Episodes of deterministic environments are replayed
            from a log; others are restored from a snapshot.
        checkpoints: take a snapshot after every turn of an environment that is not deterministic. If False, or if the
            environment has no snapshots, such a session raises SessionLost when its server is lost.
        timeout: seconds after which a call without a reply is sent again. The server executes it only once.
        patience: maximum seconds for one call, including all retries and recoveries.
        grace: seconds to wait for a broken connection to return before its sessions are moved.
        batches_in_flight: number of messages in flight per server at which further calls wait. They then leave in one
            message.
        discover: also use the other worker processes that a server lists.
        health_seconds: seconds between health checks of the servers.
        max_message_bytes: maximum size of one message in either direction.
        keepalive_seconds: seconds between pings on an idle connection.
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
        self._opener = Opener(self.pool, self.recovery, checkpoints=checkpoints)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Fleet({self.replicas!r})"

    @property
    def replicas(self) -> list[Replica]:
        """The servers, with their addresses, sessions, load and health."""
        return self.pool.replicas

    @property
    def sessions(self) -> list[Session]:
        """The open sessions to which the program still holds a reference."""
        steps = [step for replica in self.replicas for step in replica.sessions]
        return [Session(self.recovery, step) for step in steps if isinstance(step, SessionState)]

    @property
    def recoveries(self) -> int:
        """Number of recovered sessions since the start."""
        return self.recovery.recoveries

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the servers. If none can be used, raise the error that all of them have, or Unreachable."""
        expect_own_grpc()
        note_fleet(self, is_open=True)
        self.loop = asyncio.get_running_loop()
        try:
            await self.pool.start(self.recovery)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all sessions on servers that can be reached, then the connections. Calls in flight fail."""
        await self.recovery.close()
        await asyncio.gather(*(replica.closer.close_all(CLOSE_SECONDS) for replica in self.replicas))
        await self.pool.close()
        note_fleet(self, is_open=False)

    async def describe(self) -> list[pb.EnvironmentSpec]:
        """Return the spec of every hosted environment version, sorted by id, newest version first."""
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
        """Open a group of sessions with the same start on one server.

        Args:
            environment_id: id of the environment. "sokoban" means the highest "sokoban-vN".
            seed: seed of the start; None lets the server draw it.
            dynamics_seed: seed of the random transitions of all members. By default each member has a different one.
            count: number of sessions.
            options: options of the environment.
            want: optional fields of observations; by default none.
            limits: limits of each episode; by default the environment's.
            version: a range such as ">=1,<2". The newest hosted version within it is opened.
            lease_seconds: seconds after which the server closes sessions that this client no longer renews; 0 means the
                server's default.

        Raises:
            UnknownEnvironment, UnknownVersion, BadArgument: the message suggests what was probably meant.
        """
        request = pb.OpenRequest(
            options=options_struct(options),
            seed=seed_number("seed", seed),
            dynamics_seed=seed_number("dynamics_seed", dynamics_seed),
            count=group_size("count", count),
            limits=limits.to_proto() if limits else None,
            lease_seconds=lease_seconds,
        )
        states = await self._opener.open(environment_id, version, request, want=want or Want(), options=options)
        return [Session(self.recovery, state) for state in states]

    async def restore(self, snapshot: Snapshot, *, want: Want | None = None, lease_seconds: float = 0.0) -> Session:
        """Open a session that continues from a snapshot.

        Args:
            snapshot: What `Session.snapshot` returned, of this fleet or another one.
            lease_seconds: How long the session lives without a call; 0 is the server's default.

        Raises:
            IncompatibleSnapshot: No hosted version of the environment can restore it.
        """
        state = await self._opener.restore(snapshot, want=want or Want(), lease_seconds=lease_seconds)
        return Session(self.recovery, state)

    async def reach(
        self,
        path: EpisodePath,
        turn: int | None = None,
        *,
        want: Want | None = None,
        lease_seconds: float = 0.0,
        visit: Callable[[Session, int], Awaitable[None]] | None = None,
    ) -> Session:
        """Open a session in an earlier state of an episode: from its last snapshot before that, or by replaying it.

        Args:
            path: the way to the state.
            turn: index of the turn before which the state is; None: the state after the last turn.
            want: optional fields of observations; by default none.
            lease_seconds: as in `open`.
            visit: called in each state that the replay passes, the last one included, with the index of its turn.

        Raises:
            ReplayDiverged: an observation differs from the path's, or a turn is refused.
            StarpodError: the session cannot be opened, or a call failed.
        """
        events = path.until(turn)
        session, restored = await self._begin(path, events, want, lease_seconds)
        first = restored or 0
        comparable = restored is None  # Restore may show the state in other words than the step that led to it
        number = sum(isinstance(event, PathTurn) for event in events[:first])
        try:
            for event in events[first:]:
                if isinstance(event, Reseeding):
                    parent = session
                    (session,) = await parent.fork(reseed=True, dynamics_seeds=[event.dynamics_seed])
                    await parent.close()
                    continue
                if comparable and event.before not in (None, session.observation.text):
                    raise ReplayDiverged(number, b"", b"", "another observation", RECORDED)
                if visit is not None:
                    await visit(session, number)
                if event.actions and event is not events[-1]:
                    await session.step(event.actions)
                    comparable = True
                number += 1
        except BaseException as error:
            await self.close_sessions([session])
            if isinstance(error, BadArgument | OutOfOrder):
                what = f"the turn was refused: {error.message}"
                raise ReplayDiverged(number + 1, b"", b"", what, RECORDED) from error
            raise
        return session

    async def _begin(
        self, path: EpisodePath, events: Sequence[PathTurn | Reseeding], want: Want | None, lease_seconds: float
    ) -> tuple[Session, int | None]:
        """Open a session at the last snapshot of these events, or at the path's origin.

        Returns it and the index of the event that comes next; None if it was opened and not restored.
        """
        for index in reversed(range(len(events))):
            if (snapshot := events[index].snapshot) is not None:
                try:
                    return await self.restore(snapshot, want=want, lease_seconds=lease_seconds), index
                except StarpodError:
                    break  # replay the episode instead
        origin = path.origin
        if isinstance(origin, Snapshot):
            return await self.restore(origin, want=want, lease_seconds=lease_seconds), 0
        (session,) = await self.open(
            origin.environment_id,
            seed=origin.seed,
            dynamics_seed=origin.dynamics_seed,
            options=origin.options,
            want=want,
            limits=origin.limits,
            version=origin.version,
            lease_seconds=lease_seconds,
        )
        return session, None

    @overload
    async def step_many(
        self, sessions: Sequence[SessionProperties], actions: Sequence[Action | Iterable[Action]]
    ) -> list[Transition]: ...

    @overload
    async def step_many(
        self,
        sessions: Sequence[SessionProperties],
        actions: Sequence[Action | Iterable[Action]],
        *,
        return_exceptions: Literal[True],
    ) -> list[Transition | BaseException]: ...

    async def step_many(
        self,
        sessions: Sequence[SessionProperties],
        actions: Sequence[Action | Iterable[Action]],
        *,
        return_exceptions: bool = False,
    ) -> Any:
        """Play one turn in each session, concurrently.

        Args:
            sessions: the sessions to step.
            actions: for each session one action, or several to execute in order.
            return_exceptions: return errors in the list instead of raising the first one.

        Returns:
            One transition per session, in order.

        Raises:
            StarpodError: the first error, after all turns are over. An error in one session does not affect the others.
            TypeError: an item is not an action. No turn is played then.
        """
        count = len(sessions)
        if len(actions) != count:
            raise ValueError(f"{count} sessions and {len(actions)} turns: give one turn for each session.")
        if not count:
            return []
        # Convert all actions before the first is sent, so that a TypeError leaves no session stepped.
        texts = set(map(type, actions)) == {str}
        turns = [] if texts else [as_actions(turn) for turn in actions]
        result: BatchResult[Transition] = BatchResult(self.loop.create_future(), count)
        states = [session.state for session in sessions]
        if texts:
            await submit_texts(states, actions, result)  # type: ignore[arg-type]
        for slot, turn in enumerate(turns):
            if states[slot].busy:
                await states[slot].acquire()
            submit(states[slot], turn, None, result, slot)
        if not return_exceptions:
            return await result.all()
        await result.future
        return result.values

    async def reset_many(
        self,
        sessions: Sequence[SessionProperties],
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> list[Observation]:
        """Start a new episode in each session, concurrently.

        Args:
            sessions: the sessions to reset.
            seeds: one seed per session; None lets the server draw that session's seed. By default it draws all seeds.
            options: options of the environment; None keeps each session's options.

        Returns:
            The first observations, in order.

        Raises:
            StarpodError: the first error, after all resets are over.
        """
        count = len(sessions)
        if seeds is None:
            seeds = [None] * count
        if len(seeds) != count:
            raise ValueError(f"{count} sessions and {len(seeds)} seeds: give one seed for each session.")
        if not count:
            return []
        changes = pb.ResetRequest(options=options_struct(options))
        numbers = [seed_number("seed", seed) for seed in seeds]
        result: BatchResult[Observation] = BatchResult(self.loop.create_future(), count)
        for slot, (session, seed) in enumerate(zip(sessions, numbers, strict=True)):
            state = session.state
            if state.busy:
                await state.acquire()
            PendingReset(
                self.recovery, state, seed, None, changes=changes, want=None, options=options, result=result, slot=slot
            ).submit()
        return await result.all()

    async def close_sessions(self, sessions: Iterable[SessionProperties]) -> None:
        """End sessions, with one call per server. Sessions on an unreachable server are closed once it is back."""
        await self.recovery.close_sessions([session.state for session in sessions], CLOSE_SECONDS)
