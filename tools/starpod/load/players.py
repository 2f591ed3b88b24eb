"""The players of one generator. Each plays episodes in a session, and opens another session after an error."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from starpod.client.connection import CLOSE, FORK, OPEN, RENDER, RENEW, SNAPSHOT, Method
from starpod.client.errors import StarpodError
from starpod.client.transport import Backoff
from starpod.load.measurements import Log, ServerTime, error_class
from starpod.load.plan import LoadPlan, Turn, make_policy, write_turn
from starpod.load.servers import EpisodeState, LoadServer, LoadSession, clock
from starpod.v1 import environment_pb2 as pb

GIVE_UP_SECONDS = 3.0
"""Seconds without any connected server after which the run ends."""
POLL_SECONDS = 0.02
"""Seconds between looks whether a server is connected again."""
OPEN_AT_ONCE = 64
OPEN_SECONDS = 20.0
"""Seconds for which an overloaded server may refuse a session. Then the run begins without that session."""
OPEN_TRIES = 3
"""Maximum number of attempts to open a session. If the plan retries overload, an overloaded server has no limit."""
MAX_MISSED_DEADLINES = 3
"""Deadlines that a call may miss before another session replaces its session."""
MAX_RECORDED = 10_000

Reply = TypeVar("Reply")


class Players:
    """The players of a generator and the servers on which they play.

    Args:
        end: called if the run cannot continue.

    Attributes:
        log: the measurements.
        running: whether a stage runs, so that failed calls are worth another try.
        fatal: why the run cannot continue; empty if it can.
        lease: seconds after which a server closes a session without calls; 0: never.
    """

    def __init__(self, plan: LoadPlan, end: Callable[[], None]) -> None:
        self.plan = plan
        self.log = Log()
        self.running = False
        self.fatal = ""
        self.all: list[Player] = []
        self.servers = [LoadServer(number, place, plan, self.log) for number, place in enumerate(plan.places)]
        self.recorded: list[dict[str, Any]] = []
        self.lease = 0.0
        self._end = end
        self._connected_at = clock()
        self._asides: set[asyncio.Task[None]] = set()

    def watch(self) -> None:
        """End the run if no server was connected for a while. Call this often."""
        if any(server.ready for server in self.servers):
            self._connected_at = clock()
        elif clock() - self._connected_at > GIVE_UP_SECONDS:
            self.end(self.unreachable())

    def begin_stage(self, *, continuous: bool) -> None:
        """Let failed calls be made again and, if continuous, sessions step as soon as a reply arrives."""
        self.running = True
        for server in self.servers:
            server.continuous = continuous

    def end_stage(self) -> None:
        self.running = False
        for server in self.servers:
            server.continuous = False

    def end(self, reason: str) -> None:
        """End the run, because it cannot continue."""
        self.fatal = self.fatal or reason
        self._end()

    def unreachable(self) -> str:
        """Return a message that says why no server can be used."""
        return "no server answers: " + "; ".join(f"{server.address}: {server.error}" for server in self.servers)

    def server_time(self) -> ServerTime:
        """Return the sums of the times that all servers have reported so far."""
        total = ServerTime()
        for server in self.servers:
            total.add(server.server_time())
        return total

    def paths(self) -> Counter[str]:
        """Return the number of steps answered so far, by key of plan.PATHS."""
        return sum((server.paths for server in self.servers), Counter())

    @property
    def in_flight(self) -> int:
        """Number of calls without a reply."""
        return sum(player.busy for player in self.all) + len(self._asides)

    # --- sessions --------------------------------------------------------------------------------------------------

    async def open_all(self, numbers: range) -> int:
        """Open sessions for players with these numbers, as many as the servers allow, and return how many are open."""
        self.all += [Player(self, number) for number in numbers[len(self.all) :]]
        slots = asyncio.Semaphore(OPEN_AT_ONCE)

        async def begin(player: Player) -> None:
            async with slots:
                if not self.fatal:
                    await player.begin()

        players = self.all[: len(numbers)]
        tasks = [asyncio.create_task(begin(player)) for player in players if player.session is None]
        if tasks:
            _, late_tasks = await asyncio.wait(tasks, timeout=OPEN_SECONDS)
            await cancel_all(late_tasks)
        return sum(player.session is not None for player in players)

    async def choose_server(self, number: int) -> LoadServer:
        """Return the server with the fewest sessions of this generator. Wait until one is connected."""
        while not (ready := [server for server in self.servers if server.ready]):
            await asyncio.sleep(POLL_SECONDS)
        return min(ready, key=lambda server: (server.sessions, (server.number - number) % len(self.servers)))

    async def renew_leases(self) -> None:
        """Renew leases until cancelled, so that servers do not close sessions during long pauses."""
        while True:
            await asyncio.sleep(self.lease / 3 if self.lease else 1.0)
            for server in self.servers if self.lease else ():
                sessions = [player.session for player in self.all if player.session is not None and not player.busy]
                if ids := [session.session_id for session in sessions if session.server is server]:
                    self.call_in_background(server, RENEW, pb.RenewRequest(session_ids=ids))

    def call_in_background(self, server: LoadServer, method: Method[Any, Any], request: Any) -> None:
        """Make a call for which no player waits."""

        async def call() -> None:
            try:
                await server.call_once(method, request, clock())
            except StarpodError as error:
                self.failed(server, method.field, error)

        if server.ready:
            task = asyncio.create_task(call())
            self._asides.add(task)
            task.add_done_callback(self._asides.discard)

    def failed(self, server: LoadServer, call: str, error: StarpodError) -> str:
        """Count a failed call and return its error class. A refused `open` or `reset` ends the run."""
        kind = error_class(error)
        self.log.failed(server.number, call, kind, str(error))
        if kind in ("bad_argument", "refused") and call in ("open", "reset"):
            self.end(f"{call}: {error}")
        return kind

    def close_sessions(self) -> None:
        """Close all sessions in which no call is in flight."""
        for player in self.all:
            if (session := player.session) is not None and not player.busy:
                self.call_in_background(session.server, CLOSE, pb.CloseRequest(session_ids=[session.session_id]))


class Player:
    """An agent that plays episodes, and its session.

    Attributes:
        session: the session; None if it has none at present.
        busy: whether a call of the session is in flight.
    """

    def __init__(self, players: Players, number: int) -> None:
        self.session: LoadSession | None = None
        self.busy = False
        self._players = players
        self._plan = plan = players.plan
        self._number = number
        self._policy = make_policy(plan.turns, number, plan.seed)
        self._rng = random.Random(f"{plan.seed}/{number}/mix")
        self._backoff = Backoff(0.02, 1.0)
        self._turn: Turn | None = None
        self._episodes = 0
        self._recording: list[Any] | None = None

    async def begin(self) -> None:
        """Open the first session, unless the servers have no room for it."""
        for attempt in itertools.count(1):
            try:
                await self._open()
                return
            except StarpodError as error:
                waits = self._plan.retry_overload and error_class(error) == "overload"
                if self._players.fatal or (attempt >= OPEN_TRIES and not waits):
                    return
                await asyncio.sleep(self._backoff.wait(error.retry_after))

    async def play(self, next_due: Callable[[], Awaitable[float]]) -> None:
        """Play until cancelled. Another session replaces one that is lost.

        next_due: waits until the session may step, and returns when the step was due.
        """
        while True:
            try:
                session = self.session or await self._open()
                if self._turn is not None:
                    await self._play_turn(session, self._turn, await next_due())
                else:
                    await self._begin_next_episode(session)
            except StarpodError as error:
                self._give_up(error_class(error))
                await asyncio.sleep(self._backoff.wait(error.retry_after))

    async def _play_turn(self, session: LoadSession, turn: Turn, due: float) -> None:
        session.set_step(turn, due)
        reply = await self._send(session)
        if reply is None:  # an overloaded server refused the step, so the same turn is played next
            self._turn = session.actions  # type: ignore[assignment]
            return
        if self._recording is not None:
            self._recording.append(write_turn(turn))
        observation, is_over = reply
        self._turn = None if is_over else self._policy.next(observation)
        if self._plan.mix and not is_over:
            await self._make_extra_call(session)

    async def _make_extra_call(self, session: LoadSession) -> None:
        """Draw an extra call from the plan's mix, and make it if one was drawn."""
        draw = self._rng.random()
        for name, share in self._plan.mix.items():
            draw -= share
            if draw < 0:
                method, request = self._extra_call(name, session)
                reply = await self._call_method(session.server, method, request)
                if method is FORK and reply is not None:
                    copies = [copy.session_id for copy in reply.sessions]
                    await self._call_method(session.server, CLOSE, pb.CloseRequest(session_ids=copies))
                return

    def _extra_call(self, name: str, session: LoadSession) -> tuple[Method[Any, Any], Any]:
        session_id = session.session_id
        match name:
            case "render":
                return RENDER, pb.RenderRequest(session_id=session_id)
            case "fork":
                key = uuid.uuid4().hex
                return FORK, pb.ForkRequest(
                    session_id=session_id, epoch=session.epoch, step_index=session.step_index, key=key
                )
            case "snapshot":
                return SNAPSHOT, pb.SnapshotRequest(session_id=session_id)
        return RENEW, pb.RenewRequest(session_ids=[session_id])

    # --- sessions and episodes ---------------------------------------------------------------------------------------

    async def _open(self) -> LoadSession:
        """Open a session on the server with the fewest sessions of this generator. Raise StarpodError."""
        players, plan = self._players, self._plan
        server = await players.choose_server(self._number)
        seed, dynamics_seed = self._policy.begin()
        request = pb.OpenRequest(
            environment_id=plan.environment_id,
            version=plan.version,
            options=plan.options_message,
            seed=seed,
            dynamics_seed=dynamics_seed,
            want=plan.want,
            key=uuid.uuid4().hex,
        )
        server.sessions += 1
        try:
            response = await self._call_method(server, OPEN, request)
        except BaseException:
            server.sessions -= 1
            raise
        players.lease = response.lease_seconds
        (state,) = response.sessions
        self.session = LoadSession(server, self._policy, state)
        self._episodes = 0
        self._begin_episode(self.session, state.observation)
        return self.session

    async def _begin_next_episode(self, session: LoadSession) -> None:
        """Reset the session, or close it and open another after `episodes_per_session` episodes."""
        self._episodes += 1
        if self._episodes == self._plan.episodes_per_session:
            await self._call_method(session.server, CLOSE, pb.CloseRequest(session_ids=[session.session_id]))
            self._forget_session()
            return
        session.set_reset(*self._policy.begin())
        if (reply := await self._send(session)) is not None:
            self._begin_episode(session, reply[0])

    def _begin_episode(self, session: LoadSession, observation: pb.Observation | None) -> None:
        self._turn = self._policy.next(observation)
        recorded = self._players.recorded
        if self._plan.record and len(recorded) < MAX_RECORDED:
            seed, dynamics_seed = session.seeds
            self._recording = []
            recorded.append({"seed": seed, "dynamics_seed": dynamics_seed, "turns": self._recording})

    def _give_up(self, kind: str) -> None:
        """Leave the session after an error of a class. The server closes it, unless it is gone."""
        session = self.session
        if session is not None and kind not in ("lost_session", "transport"):
            request = pb.CloseRequest(session_ids=[session.session_id])
            self._players.call_in_background(session.server, CLOSE, request)
        self._forget_session()

    def _forget_session(self) -> None:
        if self.session is not None:
            self.session.server.sessions -= 1
        self.session = self._recording = None

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _send(self, session: LoadSession) -> EpisodeState | None:
        """Make the session's next call. Return None if an overloaded server refuses a step that is not retried."""
        while True:
            state = await self._call(session.server, session.send, lambda: session.latest_call)
            if state is not None or session.latest_call[0] == "step":
                return state

    async def _call_method(self, server: LoadServer, method: Method[Any, Any], request: Any) -> Any:
        due = clock()
        return await self._call(server, lambda: server.call_once(method, request, due), lambda: (method.field, due))

    async def _call(
        self, server: LoadServer, send: Callable[[], Awaitable[Reply]], get_call: Callable[[], tuple[str, float]]
    ) -> Reply | None:
        """Make a call and return its reply. Make it again while that can help and the plan allows it.

        Return None if an overloaded server refused it for good. Raise StarpodError for other errors.

        Args:
            send: makes the call once.
            get_call: returns the name of the latest call, and when it was due.
        """
        players, missed = self._players, 0
        failed_call: tuple[str, float] | None = None
        self.busy = True
        try:
            while True:
                try:
                    reply = await send()
                except StarpodError as error:
                    if (call := get_call()) != failed_call:
                        if failed_call is not None:
                            self._backoff.reset()  # the call that failed before was answered
                        failed_call, missed = call, 0
                    name = call[0]
                    kind = players.failed(server, name, error)
                    if kind == "overload" and name != "open":
                        if not (players.running and self._plan.retry_overload):
                            return None
                        await asyncio.sleep(self._backoff.wait(error.retry_after))
                    elif kind == "deadline" and players.running and missed < MAX_MISSED_DEADLINES:
                        missed += 1
                    else:
                        raise
                else:
                    self._backoff.reset()
                    return reply
        except asyncio.CancelledError:
            self._forget_session()  # nobody knows whether the call will be executed
            raise
        finally:
            self.busy = False


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
