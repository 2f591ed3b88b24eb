"""Time that the live site takes for the pictures of an episode's turns, first drawn by replay and then from the cache.

    python -m benchmarks.ui.pictures [--environment sokoban-v1] [--turns 7] [--episodes 20]

Episodes of random actions are played on a local server and recorded as those of a run. `starpod ui` replays each of
them; all pictures of an episode are requested at once, as by a browser. The figure is the median over the episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from starpod.client import Fleet, Limits, Want
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgent
from starpod.trainer.data.episode import Episode
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.rollout.play import play
from tests.support import ServerProcess, start_server

LINK = "/picture?run=run&file=train-000001.jsonl.gz&member=0"


async def record(address: str, environment: str, turns: int, count: int) -> list[Episode]:
    choose, _ = REFERENCES["random"]
    episodes: list[Episode] = []
    async with Fleet(address) as fleet:
        names = next(spec.action_space.names for spec in await fleet.describe() if spec.id == environment)
        for seed in range(100 * count):
            limits = Limits(max_turns=turns, max_actions=0)
            (session,) = await fleet.open(environment, seed=seed, limits=limits, want=Want(valid_actions=True))
            episode = await play(ReferenceAgent(choose, names, random.Random(seed)), session, group=len(episodes))
            if len(episode.turns) == turns:
                episodes.append(episode)
            if len(episodes) == count:
                break
    return episodes


async def measure(site: str, episodes: list[Episode]) -> tuple[list[float], list[float]]:
    """Return the seconds for all pictures of each episode: of the first requests, and of repeated ones."""
    times: tuple[list[float], list[float]] = ([], [])
    async with httpx.AsyncClient(base_url=site, timeout=60.0) as http:
        while (await http.get(f"{LINK}&group=0&turn=0")).status_code != 200:
            await asyncio.sleep(0.2)
        for episode in episodes[1:]:
            link = f"{LINK}&group={episode.group}&turn="
            for seconds in times:
                start = time.perf_counter()
                replies = await asyncio.gather(*(http.get(f"{link}{turn}") for turn in range(len(episode.turns) + 1)))
                seconds.append(time.perf_counter() - start)
                assert all(reply.content.startswith(b"\x89PNG") for reply in replies)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="sokoban-v1")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, start_server(arguments.environment) as server:
        folder = RunFolder.create(Path(directory) / "run")
        limits = f"max_turns: {arguments.turns}, max_actions: 0"
        folder.config.write_text(f"environment: {{id: {arguments.environment}, {limits}}}\n")
        episodes = asyncio.run(record(server.address, arguments.environment, arguments.turns, arguments.episodes + 1))
        folder.write_rollouts(1, episodes, max_bytes=2**30)
        site = ServerProcess([sys.executable, "-m", "starpod.cli.main", "ui", directory, "--address", server.address])
        try:
            first_times, second_times = asyncio.run(measure(site.address, episodes))
        finally:
            site.close()
    table = Table("Pictures", "Median", "Slowest", title=f"{arguments.turns} turns of {arguments.environment}")
    for name, seconds in (("drawn by replay", first_times), ("asked for again", second_times)):
        table.add_row(name, f"{1000 * median(seconds):.0f} ms", f"{1000 * max(seconds):.0f} ms")
    Console().print(table)


if __name__ == "__main__":
    main()
