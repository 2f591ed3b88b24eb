"""Program that plays every environment with two scripted policies, through a fleet of services on this machine.

It does not train (`starpod train` does). It shows how to use the client in your own program: it plays many episodes at
once, each in its own coroutine, on several server processes that the client finds through one address.

python examples/scripted_policy.py [--episodes 64] [--address HOST:PORT]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from starpod.client import Fleet, Limits, Session, Transition, Want

LIMITS = Limits(max_turns=100, max_actions_per_turn=1, max_actions=100)
FIRST_SEED = 1000


@dataclass(slots=True)
class Tally:
    """Results of the episodes of one environment under one policy."""

    episodes: int = 0
    solved: int = 0
    turns: int = 0
    reward: float = 0.0


class Expert:
    """Policy that plays the actions of the environment's expert."""

    name = "expert"
    want = Want(expert_action=True)

    def act(self, session: Session, rng: random.Random) -> object:
        return session.observation.expert_action


class Random:
    """Policy that plays a random valid action."""

    name = "random"
    want = Want(valid_actions=True)

    def act(self, session: Session, rng: random.Random) -> object:
        actions = session.observation.valid_actions
        return rng.choice(actions) if actions else None


async def play_episode(fleet: Fleet, environment: str, policy: Expert | Random, seed: int, tally: Tally) -> None:
    """Play one episode from open to close. It ends early if the policy has no action."""
    (session,) = await fleet.open(environment, seed=seed, want=policy.want, limits=LIMITS)
    rng = random.Random(seed)
    transition: Transition | None = None
    while not session.done and (action := policy.act(session, rng)) is not None:
        transition = await session.step(action)
        tally.turns += 1
        tally.reward += transition.reward
    tally.episodes += 1
    tally.solved += bool(transition and transition.success)
    await session.close()


async def play_all(address: str, episodes: int, console: Console) -> dict[tuple[str, str], Tally]:
    """Play all environments with both policies. Episodes of one environment and policy run concurrently."""
    tallies: dict[tuple[str, str], Tally] = {}
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        async with Fleet(address) as fleet:
            specs = {spec.id: spec for spec in await fleet.describe()}
            for policy in (Expert(), Random()):
                for environment, spec in specs.items():
                    if policy.name == "random" and not spec.capabilities.valid_actions:
                        continue
                    tally = tallies[environment, policy.name] = Tally()
                    task = progress.add_task(f"{environment} {policy.name}", total=episodes)
                    tasks = [
                        play_episode(fleet, environment, policy, FIRST_SEED + number, tally)
                        for number in range(episodes)
                    ]
                    for episode in asyncio.as_completed(tasks):
                        await episode
                        progress.advance(task)
    return tallies


@contextlib.contextmanager
def local_services(workers: int) -> Iterator[str]:
    """Run `starpod serve` as a separate process, and yield its address."""
    command = [sys.executable, "-m", "starpod.cli.main", "serve", "--workers", str(workers), "--port", "0"]
    command.append("--end-with-stdin")  # it ends whenever this process ends
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit("starpod serve did not start; see above")
        try:
            yield line.split()[-1]
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Scripted policies through a fleet. Nothing is trained.")
    parser.add_argument("--episodes", type=int, default=64, help="of each environment under each policy")
    parser.add_argument("--workers", type=int, default=2, help="server processes to start")
    parser.add_argument("--address", help="use this server instead of starting one")
    arguments = parser.parse_args()
    console = Console()
    services = contextlib.nullcontext(arguments.address) if arguments.address else local_services(arguments.workers)
    with services as address:
        start = perf_counter()
        tallies = asyncio.run(play_all(address, arguments.episodes, console))
        seconds = perf_counter() - start
    table = Table("Environment", "Policy", "Episodes", "Solved", "Mean turns", "Mean reward")
    for (environment, policy), tally in sorted(tallies.items()):
        count = tally.episodes
        table.add_row(
            environment,
            policy,
            str(count),
            f"{tally.solved / count:.0%}",
            f"{tally.turns / count:.1f}",
            f"{tally.reward / count:.2f}",
        )
    console.print(table)
    turns = sum(tally.turns for tally in tallies.values())
    console.print(f"{turns:,} turns in {seconds:.1f} s. Nothing was trained.", highlight=False)


if __name__ == "__main__":
    main()
