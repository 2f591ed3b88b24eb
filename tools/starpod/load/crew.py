"""The sessions of one generator: what they call, and what follows from what comes back.

Everything happens in callbacks on one event loop: a coroutine for each session would cost more than the session.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from starpod.client.errors import StarpodError, Unreachable
from starpod.load.failures import error_class
from starpod.load.link import Link, Player, clock
from starpod.load.log import Log
from starpod.load.plan import Plan
from starpod.load.policies import make_policy, write_turn
from starpod.load.requests import Requests
from starpod.v1 import environment_pb2 as pb

GIVE_UP_SECONDS = 3.0
"""Without any server for so long, the run is over."""
OPEN_AT_ONCE = 64
OPEN_SECONDS = 20.0
"""An overloaded server may refuse a session for so long; then the run begins without it."""
OPEN_TRIES = 3
"""Tries to open a session, where waiting is not wanted or would not help."""
MAX_STRIKES = 3
"""Deadlines that a session may miss in a row before another one is opened."""
MAX_RECORDED = 10_000
NOBODY = -1


class Crew:
    """Players and the servers on which they play.

    log: where results are written. free: called with a player whose call has come back and who may make the next.
    running: players go on by themselves. doom: why the run cannot go on; empty while it can.
    in_flight: calls without a reply.
    """

    def __init__(self, plan: Plan, process: int, free: Callable[[Player], None]) -> None:
        self.log = Log()
        self.running = False
        self.doom = ""
        self.in_flight = 0
        self.players: list[Player] = []
        self.links: list[Link] = []
        self.recorded: list[dict[str, Any]] = []
        self._plan = plan
        self._process = process
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{plan.seed}/{process}/mix")
        self._requests = Requests(plan)
        self._episodes = 0
        self._lease = 0.0
        self._missing: set[Player] = set()
        self._queue: deque[Player] = deque()
        self._homeless: list[Player] = []
        self._alone_since: float | None = None

    # --- servers ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Starts the connections; they come back by themselves."""
        for number, place in enumerate(self._plan.places):
            kind = _link_type(self._plan)
            self.links.append(kind(number, place, self._plan, self, sees=self._requests.sees))
            self.links[-1].start()

    def connected(self, link: Link) -> None:
        """A server is there, again: whoever waits for one opens a session."""
        waiting, self._homeless = self._homeless, []
        for player in waiting:
            self._loop.call_soon(self.open, player)

    def watch(self) -> None:
        """Gives the run up where no server has been there for a while. To be called now and then."""
        if any(link.ready for link in self.links):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = clock()
        elif clock() - self._alone_since > GIVE_UP_SECONDS:
            self.doom = self.doom or self.nobody()

    def nobody(self) -> str:
        """Why no server can be used."""
        return "no server answers: " + "; ".join(f"{link.place.address}: {link.error}" for link in self.links)

    # --- opening and closing ---------------------------------------------------------------------------------------

    async def fill(self, numbers: range) -> list[Player]:
        """Opens a session for each of the numbers, as far as the servers let it; returns those that have one."""
        for number in numbers[len(self.players) :]:
            self.players.append(Player(number, make_policy(self._plan.turns, number, self._plan.seed)))
        wanted = self.players[: len(numbers)]
        self._homeless.clear()
        self._missing = {player for player in wanted if player.link is None}
        self._queue = deque(player for player in wanted if player.link is None)
        for _ in range(OPEN_AT_ONCE):
            self._open_next()
        until = clock() + OPEN_SECONDS
        while self._missing and not self.doom and clock() < until:
            self.watch()
            await asyncio.sleep(0.005)
        self._missing.clear()
        return [player for player in wanted if player.link is not None]

    def open(self, player: Player) -> None:
        """Opens a session on the server that has the fewest of ours."""
        if player.link is not None:
            return
        ready = [link for link in self.links if link.ready]
        if not ready:
            self._homeless.append(player)
            return
        link = min(ready, key=lambda link: (link.players, (link.number - player.number) % len(self.links)))
        link.players += 1
        player.link = link
        player.episodes = 0
        seed, dynamics_seed = self._seeds(player)
        self.issue(player, "open", self._requests.open(seed, dynamics_seed))

    def close(self, player: Player) -> None:
        self.issue(player, "close", self._requests.close(player.session_id))

    async def renew_leases(self) -> None:
        """Sessions that rest for long must not be reaped. Goes on without end."""
        while True:
            await asyncio.sleep(self._lease / 3 if self._lease else 1.0)
            for link in self.links:
                ids = [player.session_id for player in self.players if player.link is link and not player.call]
                if self._lease and ids:
                    self._call_aside(link, "renew", pb.RenewRequest(session_ids=ids))

    def _call_aside(self, link: Link, call: str, request: Any) -> None:
        """A call that belongs to no player."""
        if link.ready:
            nobody = Player(NOBODY, self.players[0].policy)
            nobody.link = link
            self.issue(nobody, call, request)

    def _open_next(self) -> None:
        if self._queue:
            self.open(self._queue.popleft())

    def _settled(self, player: Player) -> None:
        """It has a session now, or will have none."""
        if player in self._missing:
            self._missing.discard(player)
            self._open_next()

    def _leave(self, player: Player) -> None:
        """The session is gone, or no longer ours."""
        if player.link is not None:
            player.link.players -= 1
        player.link, player.session_id, player.socket, player.played = None, "", None, None
        player.again = False

    # --- calls -----------------------------------------------------------------------------------------------------

    def step(self, player: Player, due: float | None) -> bool:
        """Plays the next turn. False if another episode must begin first: then that is what was called."""
        turn = player.turn if player.again else None if player.over else player.policy.next(player.observation)
        if turn is None:
            self._next_episode(player)
            return False
        player.turn, player.again = turn, False
        if player.played is not None:
            player.played.append(write_turn(turn))
        self.issue(player, "step", None, due)
        return True

    def issue(self, player: Player, call: str, request: Any, due: float | None = None) -> None:
        """Sends a call. due: when it should have been sent; None: now."""
        player.call, player.request = call, request
        self.in_flight += 1
        player.due = due or clock()
        self._send(player, player.due if due is None else clock())

    def _send(self, player: Player, now: float) -> None:
        link = player.link
        assert link is not None
        player.sent = now
        if link.ready:
            link.send(player)
        else:
            self._loop.call_soon(self.failed, player, link.error or Unreachable("not connected"), now)

    def stepped(self, player: Player, over: bool, now: float) -> None:
        """A step came back. The hot path."""
        link = player.link
        assert link is not None
        self.in_flight -= 1
        player.call = ""
        if player.troubled:
            self._recover(player)
        self.log.answered(link.number, "step", player.due, player.sent, now)
        if over:
            player.over, player.played = True, None
            if self.running:
                self._next_episode(player)
        elif not self._plan.mix or not self.running or not self._extra(player):
            self._free(player)

    def answered(self, player: Player, response: Any, now: float) -> None:
        """Any other call came back."""
        link, call = player.link, player.call
        assert link is not None
        self.in_flight -= 1
        player.call = ""
        if player.troubled:
            self._recover(player)
        self.log.answered(link.number, call, player.due, player.sent, now)
        if player.number == NOBODY:
            return
        match call:
            case "open":
                self._lease = response.lease_seconds if response else 0.0
                self._begin_episode(player, response.sessions[0] if response else None)
                self._settled(player)
            case "reset":
                self._begin_episode(player, response.session if response else None)
            case "fork":
                copies = [session.session_id for session in response.sessions]
                self.issue(player, "close", self._requests.close(*copies))
                return
            case "close" if player.request is None or player.session_id in player.request.session_ids:
                self._leave(player)
                if self.running:
                    self.open(player)
                return
        self._free(player)

    def failed(self, player: Player, error: StarpodError, now: float) -> None:
        """A call failed: it is counted, and then follows what its class advises."""
        link, call = player.link, player.call
        assert link is not None
        kind = error_class(error)
        self.log.failed(link.number, call, kind, str(error))
        player.troubled = True
        if self._again(player, kind, error):
            return
        self.in_flight -= 1
        player.call = ""
        if player.number == NOBODY:
            return
        if kind == "overload" and call != "open":
            player.again = call == "step"
            self._loop.call_soon(self._free, player)
            return
        if kind in ("bad_argument", "refused") and call in ("open", "reset"):
            self.doom = self.doom or f"{call}: {error}"
        if call == "step" and player.played:
            player.played.pop()
        if player.session_id and kind not in ("lost_session", "transport"):
            self._call_aside(link, "close", self._requests.close(player.session_id))
        self._leave(player)
        wait = player.backoff.wait(error.retry_after)
        if player in self._missing:
            player.strikes += 1
            if player.strikes < OPEN_TRIES or (kind == "overload" and self._plan.retry_overload):
                self._loop.call_later(wait, self.open, player)
            else:
                self._settled(player)
        elif self.running:
            self._loop.call_later(wait, self.open, player)

    def _again(self, player: Player, kind: str, error: StarpodError) -> bool:
        """Sends the very same call once more, where that helps and is wanted."""
        if not self.running or player.call == "open":
            return False
        if kind == "deadline" and player.strikes < MAX_STRIKES and self._plan.wire != "openenv":
            player.strikes += 1
            wait = 0.0
        elif kind == "overload" and self._plan.retry_overload:
            wait = player.backoff.wait(error.retry_after)
        else:
            return False
        self._loop.call_later(wait, lambda: self._send(player, clock()))
        return True

    def _recover(self, player: Player) -> None:
        player.troubled = False
        player.strikes = 0
        player.backoff.reset()

    def _extra(self, player: Player) -> bool:
        """Whether another call follows the step, as the mix has it."""
        draw = self._rng.random()
        for call, share in self._plan.mix.items():
            draw -= share
            if draw < 0:
                self.issue(player, call, self._requests.extra(call, player))
                return True
        return False

    # --- episodes --------------------------------------------------------------------------------------------------

    def _next_episode(self, player: Player) -> None:
        """Resets, or closes and opens anew where sessions are to live for so many episodes."""
        player.episodes += 1
        if player.episodes == self._plan.episodes_per_session:
            self.close(player)
            return
        seed, dynamics_seed = self._seeds(player)
        self.issue(player, "reset", self._requests.reset(player, seed, dynamics_seed))

    def _seeds(self, player: Player) -> tuple[int, int | None]:
        seed, dynamics_seed = player.policy.begin()
        self._episodes += 1
        if seed is None:
            seed = self._plan.seed + self._process + self._plan.processes * self._episodes
        return seed, dynamics_seed

    def _begin_episode(self, player: Player, session: pb.Session | None) -> None:
        player.over = False
        seeds: dict[str, Any] = {}
        if session is not None:
            player.session_id, player.epoch, player.index = session.session_id, session.epoch, session.step_index
            player.observation = session.observation if self._requests.sees else None
            seeds = {"seed": session.seed, "dynamics_seed": session.dynamics_seed}
        if self._plan.record and len(self.recorded) < MAX_RECORDED:
            player.played = []
            self.recorded.append({**seeds, "turns": player.played})


def _link_type(plan: Plan) -> type[Link]:
    if plan.wire == "openenv":
        from starpod.load.openenv_link import OpenEnvLink

        return OpenEnvLink
    from starpod.load.grpc_link import StreamLink, UnaryLink

    return StreamLink if plan.wire == "stream" else UnaryLink
