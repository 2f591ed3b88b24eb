"""Comparison of collection during updates with lock step: iterations and success per hour, with steps of 5 to 500 ms.

    python -m benchmarks.training.asynchrony [--staleness 0 1 2 4] [--iterations 24] [--rounds 3] [--seeds 1]
    python -m benchmarks.training.asynchrony --job frozen_lake_llm --iterations 6 --rounds 2      a pretrained model

Runs of `starpod train` with the same warm start differ only in `collect.max_staleness`. They take turns: each stops by
SIGTERM after its share of a round and is resumed in the next one, so that slow minutes of the machine affect all. Step
times have a clipped Pareto distribution with tail index 1. Evaluations play the same lake without delays. Only
iterations count towards the measured time.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import child_process
from benchmarks.results import RESULTS, print_table, write_result
from starpod.trainer.output.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "benchmarks" / "serving" / "environments.py"
JOBS = {
    "frozen_lake": (
        # The job's values at the time of the measurement.
        "algorithm.advantage=gae",
        "algorithm.mini_batch_size=32",
        "optimizer.critic_lr=0.001",
        "optimizer.schedule=constant",
        "rewards.format_penalty=-0.1",
        "evaluation.every=5",
        "evaluation.greedy=false",
        "warm_start.steps=100",
        "warm_start.episodes=300",
        "collect.groups=8",
        "collect.group_size=16",
    ),
    "frozen_lake_llm": ("evaluation.every=3",),
}
"""Jobs, with the keys that each sets in addition to the common ones."""


def words(job: str, staleness: int) -> list[str]:
    """Return the arguments of `starpod train`. The service has a thread for each episode that can run at a time."""
    threads = 8 * 16 * (staleness + 1)
    return [
        job,
        f"environment.serve=[{ENVIRONMENTS},--threads,'{threads}']",
        f"collect.max_staleness={staleness}",
        "environment=slow_lake-v1",
        "environment.options.shortest=0.005",
        "environment.options.longest=0.5",
        "evaluation.options.shortest=0",
        "evaluation.episodes=128",
        "evaluation.reference=[]",
        "stop.minutes=null",
        "monitor.screen=plain",
        *JOBS[job],
    ]


def train(folder: Path, *arguments: str, until: int | None = None) -> None:
    """Train to the end, or until `until` iterations are done."""
    command = [sys.executable, "-m", "starpod.cli.main", "train", *arguments, "--run-dir", str(folder)]
    with child_process(command) as process:
        while process.poll() is None and (until is None or len(RunFolder(folder).read_metrics()) < until):
            time.sleep(0.05)
        process.terminate()
        process.wait()
    if process.returncode not in (0, 128 + signal.SIGTERM):
        raise SystemExit(f"{folder} failed with status {process.returncode}")


def summary(staleness: int, seed: int, success: float, folder: Path) -> dict[str, Any]:
    """Return the figures of a run. success: rate of an evaluation at which the time to success is taken."""
    metrics = [step["metrics"] for step in RunFolder(folder).read_metrics()]
    evaluations = RunFolder(folder).read_evaluations()
    clock = [0.0, *itertools.accumulate(step["time/step"] for step in metrics)]
    curve = [(clock[evaluation["step"]], evaluation["success"]) for evaluation in evaluations]
    success_time = next((seconds for seconds, rate in curve if rate >= success), None)

    def mean(name: str) -> float:
        return statistics.fmean(step.get(name, 0.0) for step in metrics)

    return {
        "staleness": staleness,
        "seed": seed,
        "seconds": clock[-1],
        "iterations": len(metrics),
        "successes": sum(step["collect/success"] * step["collect/episodes"] for step in metrics),
        "minutes_to_success": success_time and success_time / 60,
        "curve": curve,
        "last": evaluations[-1]["success"],
        "staleness_mean": mean("collect/staleness_mean"),
        "staleness_max": max(step.get("collect/staleness_max", 0.0) for step in metrics),
        "stale_groups": sum(step.get("collect/stale_groups", 0.0) for step in metrics),
        "overlap": mean("time/overlap_share"),
        "collecting": mean("time/collect"),
        "updating": mean("time/update"),
        "failed": sum(step["collect/failed"] for step in metrics),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, default="frozen_lake")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="in which the runs take turns")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--success", type=float, default=0.7, help="of an evaluation, whose first time is noted")
    parser.add_argument("--runs", type=Path, default=Path("runs/asynchrony"), help="where the runs go")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    job = arguments.job
    file = arguments.json or RESULTS / ("asynchrony.json" if job == "frozen_lake" else f"asynchrony_{job}.json")
    results = []
    for seed in range(1, arguments.seeds + 1):
        base_run = arguments.runs / str(seed)
        folders = {staleness: arguments.runs / f"{seed}-{staleness}" for staleness in arguments.staleness}
        for folder in (base_run, *folders.values()):
            shutil.rmtree(folder, ignore_errors=True)
        train(base_run, *words(job, 0), f"seed={seed}", "stop.iterations=0")
        for folder in folders.values():
            shutil.copytree(base_run, folder)
        for number in range(1, arguments.rounds + 1):
            until = arguments.iterations * number // arguments.rounds if number < arguments.rounds else None
            for staleness, folder in folders.items():
                run_words = (*words(job, staleness), f"seed={seed}", f"stop.iterations={arguments.iterations}")
                train(folder, *run_words, "--resume", until=until)
        results += [summary(staleness, seed, arguments.success, folder) for staleness, folder in folders.items()]
    content = {"success": arguments.success, "results": results}
    write_result(file, content)
    print_table(*asynchrony_table(content))


def asynchrony_table(content: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table, with a row per bound of staleness. Figures are means over its seeds."""
    rows = []
    for bound in dict.fromkeys(result["staleness"] for result in content["results"]):
        runs: Sequence[Mapping[str, Any]] = [run for run in content["results"] if run["staleness"] == bound]
        minutes = [run["minutes_to_success"] for run in runs if run["minutes_to_success"] is not None]
        hours = sum(run["seconds"] for run in runs) / 3600
        rows.append(
            [
                str(bound) if bound else "0 (lock step)",
                f"{sum(run['iterations'] for run in runs) / hours:,.0f}",
                f"{sum(run['successes'] for run in runs) / hours:,.0f}",
                f"{statistics.fmean(minutes):.1f}"
                if len(minutes) == len(runs)
                else f"{len(minutes)} of {len(runs)} runs",
                f"{statistics.fmean(run['last'] for run in runs):.0%}".replace("%", " %"),
                f"{statistics.fmean(run['staleness_mean'] for run in runs):.2f}",
                f"{max(run['staleness_max'] for run in runs):.0f}",
                f"{statistics.fmean(run['overlap'] for run in runs):.0%}".replace("%", " %"),
            ]
        )
    head = [
        "collect.max_staleness",
        "Iterations/h",
        "Successes/h",
        f"Minutes to {content['success']:.0%}".replace("%", " %"),
    ]
    return [*head, "Success at the end", "Staleness, mean", "most", "Update overlapped"], rows


if __name__ == "__main__":
    main()
