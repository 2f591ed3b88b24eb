"""Cost of hosting: a step and a session of FrozenLake-v1, in Gymnasium alone and hosted in each class.

    python -m benchmarks.serving.hosting [--steps 4000] [--json FILE]

Figures are CPU time of the server and its children, because wall time depends on how busy the machine is.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import gymnasium

from benchmarks.machine import cpu_seconds, descendants, origin
from starpod.client import SyncFleet
from tests.support import ROOT, start_server

CLASSES = ("inline", "thread", "process")
ACTIONS = ("1", "2", "0", "3")


def in_process(steps: int) -> float:
    """Return the CPU seconds per step of a plain loop over Gymnasium."""
    environment = gymnasium.make("FrozenLake-v1", disable_env_checker=True)
    environment.reset(seed=1)
    start = time.process_time()
    for step in range(steps):
        *_, terminated, truncated, _ = environment.step(int(ACTIONS[step % 4]))
        if terminated or truncated:
            environment.reset(seed=step)
    return (time.process_time() - start) / steps


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants."""
    return sum(map(cpu_seconds, (pid, *descendants(pid))))


def memory(pid: int) -> int:
    """Return the memory in bytes of a process and all its descendants. Shared pages count once."""
    total = 0
    for process in (pid, *descendants(pid)):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def hosted(kind: str, steps: int, sessions: int) -> dict[str, float]:
    spec = f"FrozenLake-v1#concurrency={kind}&id=lake-v1&info=no"
    with start_server("--host", f"gymnasium:{spec}") as server, SyncFleet(server.address) as fleet:
        fleet.open("lake-v1", seed=0)
        idle_bytes, start = memory(server.pid), cpu(server.pid)
        open_sessions = [fleet.open("lake-v1", seed=seed)[0] for seed in range(sessions)]
        open_cpu = (cpu(server.pid) - start) / sessions
        session_bytes = (memory(server.pid) - idle_bytes) / sessions
        start = cpu(server.pid)
        for step in range(0, steps, sessions):
            done_sessions = [session for session in open_sessions if session.done]
            fleet.reset_many(done_sessions, [step] * len(done_sessions))
            fleet.step_many(open_sessions, [ACTIONS[step // sessions % 4]] * sessions)
        return {
            "step_us": (cpu(server.pid) - start) / steps * 1e6,
            "open_ms": open_cpu * 1e3,
            "session_kb": session_bytes / 1024,
        }


@click.command()
@click.option("--steps", default=4000, show_default=True, type=click.IntRange(1))
@click.option("--sessions", default=20, show_default=True, type=click.IntRange(1))
@click.option(
    "--json",
    "file",
    type=click.Path(path_type=Path),
    default=ROOT / "docs" / "benchmarks" / "hosting.json",
    help="Write the figures here.",
)
def main(steps: int, sessions: int, file: Path) -> None:
    """Measures what a step and a session of a hosted environment cost the server."""
    figures = {"in process": {"step_us": in_process(steps) * 1e6}}
    for kind in CLASSES:
        figures[kind] = hosted(kind, steps, sessions)
    for name, row in figures.items():
        click.echo(f"{name:10} " + "  ".join(f"{key} {value:.1f}" for key, value in row.items()))
    content = {
        **origin(),
        "results": figures,
    }
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
