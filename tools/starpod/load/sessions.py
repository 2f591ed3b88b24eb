"""The sessions of one generator: which calls they make, and how they continue after a reply or an error.

Everything happens in callbacks on one event loop, because a coroutine per session would cost more than its calls.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter, deque
from collections.abc import Callable, Container
from typing import Any

from google.protobuf import struct_pb2

from starpod.client.errors import DeadlineExceeded, StarpodError, Unreachable
from starpod.load.measurements import Log, ServerTime, error_class
from starpod.load.plan import LoadPlan, Turn, make_policy, write_turn
from starpod.load.servers import LoadServer, LoadSession, clock
from starpod.v1 import environment_pb2 as pb

GIVE_UP_SECONDS = 3.0
"""Seconds without any connected server after which the run ends."""
OPEN_AT_ONCE = 64
OPEN_SECONDS = 20.0
"""Seconds for which an overloaded server may refuse a session. Then the run begins without that session."""
OPEN_TRIES = 3
"""Maximum number of attempts to open a session. If the plan retries overload, an overloaded server has no limit."""
MAX_MISSED_DEADLINES = 3
"""Deadlines that a session may miss in a row before another session replaces it."""
MAX_RECORDED = 10_000
NO_SESSION = -1
"""Session number of calls that belong to no session."""


class Sessions:
    """The sessions of a generator and the servers on which they run.

    Args:
        on_ready: called with each session that may make its next call.

    Attributes:
        log: the measurements.
        running: whether sessions continue by themselves after a reply.
        continuous: whether each session steps again as soon as its reply arrives.
        fatal: why the run cannot continue; empty if it can.
        in_flight: number of calls without a reply.
        sees: whether the policies look at observations.
    """

    def __init__(self, plan: LoadPlan, process: int, on_ready: Callable[[LoadSession], None]) -> None:
        self.log = Log()
        self.running = self.continuous = False
        self.fatal = ""
        self.in_flight = 0
        self.all: list[LoadSession] = []
        self.servers: list[LoadServer] = []
        self.recorded: list[dict[str, Any]] = []
        self._plan = plan
        self._process = process
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{plan.seed}/{process}/mix")
        chooses = plan.turns.kind != "recorded"
        self._want = pb.Want(
            valid_actions=chooses and not plan.turns.actions, expert_action=chooses and plan.turns.kind == "expert"
        )
        self.sees = bool(self._want.ListFields())
        self._options = struct_pb2.Struct()
        self._options.update(dict(plan.options or {}))
        self._key = uuid.uuid4().hex
        self._keys = 0
        self._episodes = 0
        self._lease = 0.0
        self._opening: set[LoadSession] = set()
        self._queue: deque[LoadSession] = deque()
        self._sessions_without_server: list[LoadSession] = []
        self._failing = 0
        self._unreachable_since: float | None = None
        self._deadlines_at = 0.0

    # --- servers ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start the connections, which reconnect by themselves."""
        for number, place in enumerate(self._plan.places):
            self.servers.append(LoadServer(number, place, self._plan, self))
            self.servers[-1].start()

    def connected(self) -> None:
        """Open the sessions that waited until a server was connected."""
        sessions, self._sessions_without_server = self._sessions_without_server, []
        for session in sessions:
            self._loop.call_soon(self.open, session)

    def watch(self) -> None:
        """End the run if no server was connected for a while, and count missed deadlines. Call this often."""
        now = clock()
        if any(server.ready for server in self.servers):
            self._unreachable_since = None
        elif self._unreachable_since is None:
            self._unreachable_since = now
        elif now - self._unreachable_since > GIVE_UP_SECONDS:
            self.fatal = self.fatal or self.unreachable()
        if self._plan.wire == "stream" and now >= self._deadlines_at:
            self._deadlines_at = now + min(self._plan.timeout / 4, 1.0)
            self._count_missed_deadlines(now)

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

    def _count_missed_deadlines(self, now: float) -> None:
        """Count calls whose reply is late. The connection sends them again, up to MAX_MISSED_DEADLINES times."""
        timeout = self._plan.timeout
        for session in [session for session in self.all if session.call and now - session.deadline_start > timeout]:
            error = DeadlineExceeded(f"no reply within {timeout:g} s")
            if session.missed < MAX_MISSED_DEADLINES:
                assert session.server is not None
                self.log.failed(session.server.number, session.call, "deadline", str(error))
                session.deadline_start = now
                session.missed += 1
                self._mark_failing(session)
            else:
                self._replace_session(session, error, now)

    def _replace_session(self, session: LoadSession, error: StarpodError, now: float) -> None:
        """Give a session up and let another one continue in its place. A late reply to the old one is ignored."""
        successor = LoadSession(session.number, session.policy)
        self.all[self.all.index(session)] = successor
        if session in self._opening:
            self._opening.remove(session)
            self._opening.add(successor)
        self.failed(session, error, now, successor=successor)
        session.abandoned = True

    # --- opening and closing ---------------------------------------------------------------------------------------

    async def open_all(self, numbers: range) -> int:
        """Open sessions with these numbers, as many as the servers allow, and return how many are open."""
        for number in numbers[len(self.all) :]:
            self.all.append(LoadSession(number, make_policy(self._plan.turns, number, self._plan.seed)))
        new_sessions = [session for session in self.all[: len(numbers)] if session.server is None]
        self._sessions_without_server.clear()
        self._opening = set(new_sessions)
        self._queue = deque(new_sessions)
        for _ in range(OPEN_AT_ONCE):
            self._open_next()
        deadline = clock() + OPEN_SECONDS
        while self._opening and not self.fatal and clock() < deadline:
            self.watch()
            await asyncio.sleep(0.005)
        self._opening.clear()
        return sum(session.server is not None for session in self.all[: len(numbers)])

    def open(self, session: LoadSession) -> None:
        """Open a session on the server with the fewest sessions of this generator."""
        if session.server is not None:
            return
        ready = [server for server in self.servers if server.ready]
        if not ready:
            self._sessions_without_server.append(session)
            return
        server = min(ready, key=lambda server: (server.sessions, (server.number - session.number) % len(self.servers)))
        server.sessions += 1
        session.server = server
        session.episodes = 0
        seed, dynamics_seed = self._seeds(session)
        request = pb.OpenRequest(
            environment_id=self._plan.environment_id,
            version=self._plan.version,
            options=self._options if self._plan.options else None,
            seed=seed,
            dynamics_seed=dynamics_seed,
            want=self._want if self.sees else None,
            key=self._new_key(),
        )
        self._issue(session, "open", request)

    def close(self, session: LoadSession) -> None:
        self._issue(session, "close", pb.CloseRequest(session_ids=[session.session_id]))

    async def renew_leases(self) -> None:
        """Renew leases until cancelled, so that servers do not close sessions during long pauses."""
        while True:
            await asyncio.sleep(self._lease / 3 if self._lease else 1.0)
            for server in self.servers:
                ids = [session.session_id for session in self.all if session.server is server and not session.call]
                if self._lease and ids:
                    self._call_aside(server, "renew", pb.RenewRequest(session_ids=ids))

    def _call_aside(self, server: LoadServer, call: str, request: Any) -> None:
        """Make a call that belongs to no session."""
        if server.ready:
            caller = LoadSession(NO_SESSION, self.all[0].policy)
            caller.server = server
            self._issue(caller, call, request)

    def _open_next(self) -> None:
        if self._queue:
            self.open(self._queue.popleft())

    def _end_opening(self, session: LoadSession) -> None:
        if session in self._opening:
            self._opening.discard(session)
            self._open_next()

    def _forget_server_session(self, session: LoadSession) -> None:
        """Detach a session that is gone or no longer used from its server."""
        if session.server is not None:
            session.server.sessions -= 1
        session.server, session.session_id, session.recording = None, "", None
        session.resend = False

    # --- calls -----------------------------------------------------------------------------------------------------

    def step(self, session: LoadSession, due: float | None) -> bool:
        """Play the next turn. If the episode has ended, begin another one instead and return False."""
        turn: Turn | None = None
        if session.resend:
            turn = session.actions  # type: ignore[assignment]
        elif not session.over:
            turn = session.policy.next(session.observation)
        if turn is None:
            self._next_episode(session)
            return False
        session.actions, session.resend = turn, False  # type: ignore[assignment]
        session.plain = all(isinstance(action, str) for action in turn)
        if session.recording is not None:
            session.recording.append(write_turn(turn))
        self._issue(session, "step", None, due)
        return True

    def _issue(self, session: LoadSession, call: str, request: Any, due: float | None = None) -> None:
        """Send a call. due: when it should have been sent; None: now."""
        session.call, session.request = call, request
        self.in_flight += 1
        now = clock()
        session.due = now if due is None else due
        self._send(session, now)

    def _send(self, session: LoadSession, now: float) -> None:
        server = session.server
        assert server is not None
        session.sent = session.deadline_start = now
        if server.ready:
            server.send(session)
        else:
            self._loop.call_soon(self.failed, session, server.error or Unreachable("not connected"), now)

    def stepped(self, server: LoadServer, steps: list[LoadSession], ended: Container[int], now: float) -> None:
        """Continue after steps were answered; `ended` has the indices in `steps` whose episodes ended.

        This is the hot path; measure it with `python -m benchmarks.serving.throughput --way "starpod load" --way
        "starpod, step_many"`.
        """
        if self._failing:
            flags = [not session.abandoned for session in steps]
            ended = [index for index, row in enumerate([row for row, keep in enumerate(flags) if keep]) if row in ended]
            steps = [session for session, keep in zip(steps, flags, strict=True) if keep]
            for session in steps:
                self._mark_recovered(session)
        if not (self.continuous and self.running):
            for row, session in enumerate(steps):
                self._stepped(server, session, row in ended, now)
            return
        self.log.answered_steps(server.number, [session.due for session in steps], now)
        self.in_flight -= len(steps)
        next_sessions = []
        for row, session in enumerate(steps):
            session.step_index += 1
            turn = None if row in ended else session.policy.next(None)
            if turn is None:
                session.over, session.call = True, ""
                self._next_episode(session)
                continue
            session.actions = turn  # type: ignore[assignment]
            session.due = session.sent = session.deadline_start = now
            next_sessions.append(session)
        self.in_flight += len(next_sessions)
        server.submit_steps(next_sessions)

    def _stepped(self, server: LoadServer, session: LoadSession, over: bool, now: float) -> None:
        self.in_flight -= 1
        session.call = ""
        session.step_index += 1
        self.log.answered(server.number, "step", session.due, session.sent, now)
        if over:
            session.over, session.recording = True, None
            if self.running:
                self._next_episode(session)
        elif not self._plan.mix or not self.running or not self._start_extra_call(session):
            self._on_ready(session)

    def answered(self, session: LoadSession, response: Any, now: float) -> None:
        """Continue after the reply to a call other than a step."""
        server, call = session.server, session.call
        if session.abandoned:
            return
        assert server is not None
        self.in_flight -= 1
        session.call = ""
        self._mark_recovered(session)
        self.log.answered(server.number, call, session.due, session.sent, now)
        if session.number == NO_SESSION:
            return
        match call:
            case "open":
                self._lease = response.lease_seconds
                self._begin_episode(session, response.sessions[0])
                self._end_opening(session)
            case "reset":
                self._begin_episode(session, response.session)
            case "fork":
                copies = [copy.session_id for copy in response.sessions]
                self._issue(session, "close", pb.CloseRequest(session_ids=copies))
                return
            case "close" if session.session_id in session.request.session_ids:
                self._forget_server_session(session)
                if self.running:
                    self.open(session)
                return
        self._on_ready(session)

    def failed(
        self, session: LoadSession, error: StarpodError, now: float, successor: LoadSession | None = None
    ) -> None:
        """Count a failed call, then continue as its error class requires.

        Args:
            successor: the session that continues in place of `session`; None: `session` itself continues.
        """
        server, call = session.server, session.call
        if session.abandoned:
            return
        assert server is not None
        kind = error_class(error)
        self.log.failed(server.number, call, kind, str(error))
        self._mark_failing(session)
        if successor is None and self._send_again(session, kind, error):
            return
        self.in_flight -= 1
        session.call = ""
        if session.number == NO_SESSION:
            return
        if kind == "overload" and call != "open":
            session.resend = call == "step"
            self._loop.call_soon(self._on_ready, session)
            return
        if kind in ("bad_argument", "refused") and call in ("open", "reset"):
            self.fatal = self.fatal or f"{call}: {error}"
        if call == "step" and session.recording:
            session.recording.pop()
        if session.session_id and kind not in ("lost_session", "transport"):
            self._call_aside(server, "close", pb.CloseRequest(session_ids=[session.session_id]))
        self._forget_server_session(session)
        session = successor or session
        wait = session.backoff.wait(error.retry_after)
        if session in self._opening:
            session.missed += 1
            if session.missed < OPEN_TRIES or (kind == "overload" and self._plan.retry_overload):
                self._loop.call_later(wait, self.open, session)
            else:
                self._end_opening(session)
        elif self.running:
            self._loop.call_later(wait, self.open, session)

    def _send_again(self, session: LoadSession, kind: str, error: StarpodError) -> bool:
        """Send the same call again if that can help and the plan allows it. Return whether it is sent."""
        if not self.running or session.call == "open":
            return False
        if kind == "deadline" and session.missed < MAX_MISSED_DEADLINES:
            session.missed += 1
            wait = 0.0
        elif kind == "overload" and self._plan.retry_overload:
            wait = session.backoff.wait(error.retry_after)
        else:
            return False
        session.deadline_start = clock() + wait  # the deadline does not pass during the wait
        self._loop.call_later(wait, lambda: self._send(session, clock()))
        return True

    def _mark_failing(self, session: LoadSession) -> None:
        if not session.failing:
            session.failing = True
            self._failing += 1

    def _mark_recovered(self, session: LoadSession) -> None:
        if session.failing:
            session.failing, session.missed = False, 0
            session.backoff.reset()
            self._failing -= 1

    def _start_extra_call(self, session: LoadSession) -> bool:
        """Draw an extra call from the plan's mix and send it. Return whether one was drawn and sent."""
        draw = self._rng.random()
        for call, share in self._plan.mix.items():
            draw -= share
            if draw < 0:
                self._issue(session, call, self._extra_request(call, session))
                return True
        return False

    def _extra_request(self, call: str, session: LoadSession) -> Any:
        match call:
            case "render":
                return pb.RenderRequest(session_id=session.session_id)
            case "fork":
                return pb.ForkRequest(
                    session_id=session.session_id,
                    epoch=session.epoch,
                    step_index=session.step_index,
                    key=self._new_key(),
                )
            case "snapshot":
                return pb.SnapshotRequest(session_id=session.session_id)
        return pb.RenewRequest(session_ids=[session.session_id])

    # --- episodes --------------------------------------------------------------------------------------------------

    def _next_episode(self, session: LoadSession) -> None:
        """Reset the session, or close it and open another after `episodes_per_session` episodes."""
        session.episodes += 1
        if session.episodes == self._plan.episodes_per_session:
            self.close(session)
            return
        session.seeds = self._seeds(session)
        self._issue(session, "reset", None)

    def _seeds(self, session: LoadSession) -> tuple[int, int | None]:
        seed, dynamics_seed = session.policy.begin()
        self._episodes += 1
        if seed is None:
            seed = self._plan.seed + self._process + self._plan.processes * self._episodes
        return seed, dynamics_seed

    def _new_key(self) -> str:
        self._keys += 1
        return f"{self._key}-{self._keys}"

    def _begin_episode(self, session: LoadSession, state: pb.Session) -> None:
        session.over = False
        session.session_id, session.epoch, session.step_index = state.session_id, state.epoch, state.step_index
        session.observation = state.observation if self.sees else None
        if self._plan.record and len(self.recorded) < MAX_RECORDED:
            session.recording = []
            seeds = {"seed": state.seed, "dynamics_seed": state.dynamics_seed}
            self.recorded.append({**seeds, "turns": session.recording})
