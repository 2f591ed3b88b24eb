"""Tail latency at shares of a server's maximum load.

    python -m benchmarks.serving.tail [--sessions 256] [--seconds 8] [--rounds 3]

`starpod load` runs as a separate process: first as a closed loop at full speed, to find the highest rate of server and
generator on this machine, then as open loops with Poisson arrivals at shares of that rate. Latencies of open loops
count from the time at which a step was due. Figures are medians over rounds in which the shares take turns. The server
has one core; the generator and the program that collects its figures share the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.machine import CLIENT_CORE, SERVER_CORE, only_on
from benchmarks.results import Columns, cells_of, print_table, write_result
from tests.support import ROOT, start_server

SHARES = (0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Result:
    """Latencies of a step in milliseconds. share: fraction of the closed loop's rate; 1.0 is the closed loop itself."""

    share: float
    steps_per_second: float
    p50: float
    p99: float
    p999: float


COLUMNS: Columns = {
    "Share of the closed loop's rate": lambda row: (
        "closed loop" if row["share"] == 1 else f"{row['share'] * 100:.0f} %"
    ),
    "Steps/s": lambda row: f"{row['steps_per_second']:,.0f}",
    "p50": lambda row: f"{row['p50']:.3g} ms",
    "p99": lambda row: f"{row['p99']:.3g} ms",
    "p99.9": lambda row: f"{row['p999']:.3g} ms",
    "p99.9 over p50": lambda row: f"{row['p999'] / row['p50']:.2g}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/tail.json")
    arguments = parser.parse_args()
    by_share: defaultdict[float, list[Result]] = defaultdict(list)
    console = Console(stderr=True)
    with ExitStack() as stack:
        with only_on(SERVER_CORE):
            server = stack.enter_context(start_server("frozen_lake"))
        stack.enter_context(only_on(CLIENT_CORE))
        for number in range(arguments.rounds):
            peak = 0.0
            for share in (1.0, *SHARES):
                with console.status(f"round {number + 1} of {arguments.rounds}: {share:.0%}"):
                    result = load(server.address, arguments.sessions, arguments.seconds, share, peak)
                peak = peak or result.steps_per_second
                by_share[share].append(result)
    results = [
        Result(share, *(median(getattr(entry, name) for entry in group) for name in Result.__slots__[1:]))
        for share, group in sorted(by_share.items())
    ]
    rows = [asdict(entry) for entry in results]
    print_table(list(COLUMNS), cells_of(rows, COLUMNS))
    write_result(arguments.json, {"results": rows})


def load(address: str, sessions: int, seconds: float, share: float, peak: float) -> Result:
    """Run `starpod load` once. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "starpod.cli.main", "load", address, "-e", "frozen_lake-v1"]
    command += ["--sessions", str(sessions), "--seconds", str(seconds), "--json", "-"]
    if share < 1:
        command += ["--rate", f"{share * peak:.0f}"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    stage: dict[str, Any] = json.loads(process.stdout)["stages"][0]
    step = stage["calls"]["step"]
    return Result(share, stage["steps_per_second"], *(step[name] for name in ("p50_ms", "p99_ms", "p99.9_ms")))


if __name__ == "__main__":
    main()
