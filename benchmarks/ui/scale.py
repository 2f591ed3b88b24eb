"""Time for the live site's index and pages, with many runs, a million episodes and a long run.

    python -m benchmarks.ui.scale [--runs 1000] [--episodes 1000000] [--iterations 100000] [--out DIR]

A temporary folder has made-up runs: RUNS small ones, one with EPISODES episodes of three turns (in files of 256, as
runs write them), and one with ITERATIONS iterations of sixty metrics. A `starpod ui` process indexes them. Then each
page is requested five times. The slowest time is reported, together with the site's CPU time per page, since other
programs delay pages on a machine that is not idle. The site is restarted with the complete index before the first page.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.machine import cpu_seconds
from benchmarks.results import duration, print_table, write_result
from starpod.ui.index import NAME
from tests.support import ServerProcess

TIMES = 5
PER_FILE = 256
NOTICE = 'class="notice"'
WORDS = "north south east west goal hole ice push box wall target search click buy left right up down".split()


def metrics(rng: random.Random) -> dict[str, float]:
    return {"collect/success": rng.random(), **{f"part/metric_{number}": rng.gauss(1, 0.1) for number in range(59)}}


def write_run(folder: Path, name: str, steps: int) -> Path:
    path = folder / name
    (path / "episodes").mkdir(parents=True)
    (path / "config.yaml").write_text(
        "environment: {id: frozen_lake-v1}\nalgorithm: {preset: starpo-s}\nstop: {iterations: 100000}\n"
    )
    facts = {"id": name, "title": f"Run {name}", "time": 1.7e9, "ended": {"outcome": "done", "seconds": 60.0}}
    (path / "run.json").write_text(json.dumps(facts))
    rng = random.Random(name)
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "time": 1.7e9 + step, "metrics": metrics(rng)}) + "\n")
    evaluation = {"step": steps, "success": rng.random(), "success_low": 0.1, "success_high": 0.9, "episodes": 256}
    (path / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    return path


def write_episodes(path: Path, count: int) -> None:
    rng = random.Random(0)
    for start in range(0, count, PER_FILE):
        lines = []
        for number in range(start, min(start + PER_FILE, count)):
            turns = [_turn(rng) for _ in range(3)]
            episode = {
                "group": number // 16,
                "member": number % 16,
                "environment": "frozen_lake-v1",
                "seed": number // 16,
            }
            lines.append(json.dumps({**episode, "turns": turns, "end": "terminal", "success": rng.random() < 0.5}))
        name = f"train-{start // PER_FILE + 1:06d}.jsonl.gz"
        with gzip.open(path / "episodes" / name, "wt", compresslevel=1) as file:
            file.write("\n".join(lines) + "\n")


def _turn(rng: random.Random) -> dict[str, object]:
    action = rng.choice(WORDS)
    text = f"<think>{' '.join(rng.choices(WORDS, k=8))}</think><answer>{action}</answer>"
    ids = [rng.randrange(1000) for _ in range(16)]
    return {
        "observation": " ".join(rng.choices("P_OG#", k=16)), "prompt": ids, "fresh": True, "reply": ids,
        "logprobs": [-0.1] * 16, "versions": [1] * 16, "finish": "stop" if rng.random() < 0.95 else "length",
        "text": text, "thought": text, "actions": [action], "well_formed": rng.random() < 0.9,
        "reward": rng.random(), "parts": {"environment": 1.0},
    }  # fmt: skip


def serve(folder: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-m", "starpod.cli.main", "ui", str(folder)])


def fetch(address: str) -> str:
    try:
        with urlopen(address) as reply:
            return str(reply.read().decode())
    except HTTPError as error:  # the run is not indexed yet
        return str(error.read().decode())


PAGES_HEAD = ("Page", "First after a restart", "Slowest of five", "CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="Where the runs are written, and kept: used as they are if there.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() if arguments.out is None else nullcontext(arguments.out) as directory:
        folder = Path(directory)
        if not (folder / "many").exists():
            print("writing runs ...")
            for number in range(arguments.runs):
                write_run(folder, f"small-{number:04d}", 20)
            write_run(folder, "long", arguments.iterations)
            write_episodes(write_run(folder, "many", 20), arguments.episodes)
        (folder / NAME).unlink(missing_ok=True)
        print("indexing ...")
        start = time.perf_counter()
        site = serve(folder)
        try:
            address = site.address.rstrip("/")
            # Wait until all episodes are indexed and the pages show no notice about the index.
            while f"{arguments.episodes:,} episode" not in fetch(f"{address}/episodes?run=many") or NOTICE in fetch(
                address
            ):
                time.sleep(1.0)
            indexing, indexing_cpu = time.perf_counter() - start, cpu_seconds(site.pid)
            site.close()
            site = serve(folder)
            address = site.address.rstrip("/")
            pages = {
                f"list of {arguments.runs + 2:,} runs": "/",
                f"run of {arguments.iterations:,} iterations": "/runs/long",
                f"episodes of a run with {arguments.episodes:,}": "/episodes?run=many",
                "... not solved, malformed, worst first": "/episodes?run=many&outcome=unsolved&malformed=1&sort=worst",
                "... with two words, which most of them have": "/episodes?run=many&text=goal+hole",
                "... with the beginnings of two such words": "/episodes?run=many&text=goa*+ho*",
                "... with a reward part above 0, by the return": "/episodes?run=many&part=paid+environment&sort=best",
                "... of one step": "/episodes?run=many&step=7",
                "... the last page": f"/episodes?run=many&page={arguments.episodes // 50}",
                "a group of 16": "/group?run=many&file=train-000007.jsonl.gz&group=100",
                "one episode": "/episode?run=many&file=train-000007.jsonl.gz&group=100&member=3",
                "two runs compared": "/compare?run=long&run=small-0001",
            }
            results = {}
            for name, path in pages.items():
                seconds, cpu = [], cpu_seconds(site.pid)
                for _ in range(TIMES):
                    start = time.perf_counter()
                    fetch(address + path)
                    seconds.append(time.perf_counter() - start)
                cpu = (cpu_seconds(site.pid) - cpu) / TIMES
                results[name] = {"first": seconds[0], "slowest": max(seconds), "cpu": cpu}
        finally:
            site.close()
        size = (folder / NAME).stat().st_size
    title = f"Indexed in {indexing:.0f} s, {indexing_cpu:.0f} s of CPU, {size / 2**20:.0f} MiB"
    rows = [[name, *(duration(times[key]) for key in ("first", "slowest", "cpu"))] for name, times in results.items()]
    print_table(PAGES_HEAD, rows, title)
    if arguments.json:
        facts = {
            "indexing_seconds": indexing,
            "indexing_cpu_seconds": indexing_cpu,
            "index_bytes": size,
            "pages": results,
        }
        write_result(arguments.json, facts)


if __name__ == "__main__":
    main()
