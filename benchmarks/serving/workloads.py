"""`benchmarks.serving.throughput` on other workloads: as a user calls it, slow steps, and a web shop.

    python -m benchmarks.serving.workloads [--sessions 16,64,256] [--seconds 3] [--rounds 1]

As a user calls it, the real lake is played with random moves, and calls are steps and resets. A step of 5 ms imitates a
tool or a page, and the heavy tail (Pareto, clipped at 500 ms) the web. In process, steps run one after another.
AsyncVectorEnv and Ray actors are stepped together, so each step is as slow as the slowest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks.serving.lake import VARIABLE
from tests.support import ROOT

WAITING = ("in process", "starpod, coroutines", "OpenEnv", "dm-env-rpc, tuned", "Ray actors", "AsyncVectorEnv")
COMPUTING = ("in process", "starpod, step_many", "starpod, coroutines", "OpenEnv", "OpenEnv, tuned")
USER = (
    *("in process", "starpod, step_many", "starpod, coroutines", "starpod load", "OpenEnv", "OpenEnv, tuned"),
    *("dm-env-rpc, tuned", "SyncVectorEnv"),
)
TASKS = {
    "user": ("as a user calls it", USER),
    "wait": ("steps of 5 ms", WAITING),
    "tail": ("steps with a heavy tail", WAITING),
    "webshop": ("webshop-v1, 1,000 products", COMPUTING),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="16,64,256", help="numbers of sessions, comma-separated")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-report", action="store_true", help="print the tables only, write nothing")
    arguments = parser.parse_args()
    for task, (title, ways) in TASKS.items():
        print(title, flush=True)
        command = [sys.executable, "-m", "benchmarks.serving.throughput", "--sessions", arguments.sessions]
        command += ["--seconds", str(arguments.seconds), "--rounds", str(arguments.rounds)]
        command += [word for way in ways for word in ("--way", way)]
        command += ["--json", f"docs/benchmarks/throughput_{task}.json"]
        command += ["--no-report"] if arguments.no_report else []
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, VARIABLE: task})


if __name__ == "__main__":
    main()
