"""The load generator of `benchmarks.soak`: a client that mixes all kinds of calls. It runs as a separate process.

    python -m benchmarks.soak.churn ADDRESS [--environment E ...] [--players N]

Players open groups, play, reset, fork, snapshot, restore and close; some leave their sessions open, and some use
separate connections. A number on standard input sets the steps per second from then on (0: no limit), and the end of
input ends the program. Each second, a line of JSON on standard output has the counts so far.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter

from starpod.client import Fleet, Limits, Session, StarpodError
from starpod.v1 import environment_pb2 as pb

LEASE_SECONDS = 5.0
ABANDONED = 0.1
"""Share of the groups that are never closed, so that their leases expire."""
OWN_CONNECTION = 0.02
"""Share of the groups that are played over a separate fleet."""
IN_A_PROCESS = 0.01
"""Weight of environments of class `process`, whose sessions each start a process. Others have weight 1."""
ELSEWHERE = ("1,1,1", "[1]", "(1 + 2)", "stay")
"""Actions for environments that list none. An invalid action is a normal outcome, not an error."""


class Pacer:
    """Limits the number of steps per second to `rate`; 0: no limit."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._next = 0.0

    async def take(self, count: int) -> None:
        if not self.rate:
            return
        now = asyncio.get_running_loop().time()
        # After a stall, at most 0.25 s of missed steps are made up for.
        self._next = max(self._next, now - 0.25) + count / self.rate
        if self._next > now:
            await asyncio.sleep(self._next - now)


class Churn:
    """All players. `done` counts their actions by kind."""

    def __init__(self, address: str, environments: list[str]) -> None:
        self.address = address
        self.environments = environments
        self.counts: Counter[str] = Counter()
        self.pacer = Pacer()
        self.over = False
        self._actions: dict[str, list[str]] = {}
        self._shares: list[float] = []

    async def run(self, players: int) -> None:
        async with Fleet(self.address) as fleet:
            specs = {spec.id: spec for spec in await fleet.describe()}
            self.environments = self.environments or list(specs)
            for environment in self.environments:
                spec = specs[environment]
                self._actions[environment] = list(spec.action_space.names) or list(ELSEWHERE)
                self._shares.append(IN_A_PROCESS if spec.concurrency == pb.CONCURRENCY_CLASS_PROCESS else 1.0)
            tasks = [asyncio.create_task(self._live(fleet, random.Random(number))) for number in range(players)]
            tasks.append(asyncio.create_task(self._tell()))
            await asyncio.to_thread(self._obey, asyncio.get_running_loop())
            self.over = True
            await asyncio.gather(*tasks)

    def _obey(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(setattr, self.pacer, "rate", float(line))

    async def _tell(self) -> None:
        while not self.over:
            print(json.dumps({**self.counts, "tasks": len(asyncio.all_tasks())}), flush=True)
            await asyncio.sleep(1)

    async def _live(self, fleet: Fleet, rng: random.Random) -> None:
        while not self.over:
            try:
                if rng.random() < OWN_CONNECTION:
                    async with Fleet(self.address) as own_fleet:
                        self.counts["connections"] += 1
                        await self._group(own_fleet, rng)
                else:
                    await self._group(fleet, rng)
            except StarpodError as error:
                self.counts[f"error {type(error).__name__}"] += 1
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                await asyncio.sleep(0.1)

    async def _group(self, fleet: Fleet, rng: random.Random) -> None:
        """Open a group, play with it, and close or abandon it."""
        (environment,) = rng.choices(self.environments, self._shares)
        sessions = await fleet.open(
            environment,
            seed=rng.getrandbits(32),
            count=rng.randrange(1, 5),
            limits=Limits(max_turns=20),
            lease_seconds=LEASE_SECONDS,
        )
        self.counts["opened"] += len(sessions)
        for episode in range(rng.randrange(1, 4)):
            if episode:
                await asyncio.gather(*(session.reset(seed=rng.getrandbits(32)) for session in sessions))
                self.counts["resets"] += len(sessions)
            await self._play(fleet, sessions, rng, rng.randrange(1, 20))
            if rng.random() < 0.2:
                copies = await sessions[0].fork(2, reseed=rng.random() < 0.5)
                self.counts["forks"] += len(copies)
                if not copies[0].done:
                    await self._play(fleet, copies, rng, 3)
                await fleet.close_sessions(copies)
            if rng.random() < 0.1:
                session = await fleet.restore(await sessions[0].snapshot(), lease_seconds=LEASE_SECONDS)
                self.counts["restored"] += 1
                await session.close()
        if rng.random() < ABANDONED:
            self.counts["abandoned"] += len(sessions)
        else:
            await fleet.close_sessions(sessions)
            self.counts["closed"] += len(sessions)

    async def _play(self, fleet: Fleet, sessions: list[Session], rng: random.Random, turns: int) -> None:
        for _ in range(turns):
            open_sessions = [session for session in sessions if not session.done]
            if not open_sessions or self.over:
                return
            await self.pacer.take(len(open_sessions))
            actions = self._actions[open_sessions[0].environment_id]
            await fleet.step_many(open_sessions, [rng.choice(actions) for _ in open_sessions])
            self.counts["steps"] += len(open_sessions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--environment", action="append", default=[])
    parser.add_argument("--players", type=int, default=64)
    arguments = parser.parse_args()
    asyncio.run(Churn(arguments.address, arguments.environment).run(arguments.players))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
