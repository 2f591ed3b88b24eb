"""Reports of a throughput run: a table on the terminal, JSON and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import duration, picture, print_table

BASELINES = ("in process", "SyncVectorEnv", "OpenEnv", "OpenEnv, tuned", "dm-env-rpc", "dm-env-rpc, tuned")
PEERS = (*BASELINES, "Ray actors", "AsyncVectorEnv")


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a way at one number of sessions: medians over the rounds, and the rate of each round.

    client_cpu_seconds, server_cpu_seconds: CPU time per step. In-process ways have only the client's. wire_bytes: bytes
    per step over the loopback in both directions, including headers.
    """

    way: str
    sessions: int
    steps_per_second: float
    p50_seconds: float
    p99_seconds: float
    client_cpu_seconds: float
    server_cpu_seconds: float
    wire_bytes: float
    rounds: list[float]


def ratio(results: list[Result], result: Result, baseline: str) -> float | None:
    """Return the rate divided by the baseline's at the same number of sessions; None if that was not measured."""
    for candidate in results:
        if (candidate.way, candidate.sessions) == (baseline, result.sessions):
            return result.steps_per_second / candidate.steps_per_second
    return None


def rows(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of the table."""
    baselines = [name for name in BASELINES if any(result.way == name for result in results)]
    headings = [
        "Way",
        "Sessions",
        "Steps/s",
        "p50",
        "p99",
        "CPU client",
        "CPU server",
        "Bytes",
        *(f"x {name}" for name in baselines),
    ]
    cells = []
    for result in sorted(results, key=lambda result: result.sessions):
        ratios = [ratio(results, result, name) for name in baselines]
        cells.append(
            [
                result.way,
                f"{result.sessions:,}",
                f"{result.steps_per_second:,.0f}",
                duration(result.p50_seconds),
                duration(result.p99_seconds),
                _microseconds(result.client_cpu_seconds),
                _microseconds(result.server_cpu_seconds),
                f"{result.wire_bytes:,.0f}" if result.wire_bytes >= 1 else "",
                *("" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in ratios),
            ]
        )
    return headings, cells


def print_results(results: list[Result]) -> None:
    headings, cells = rows(results)
    print_table(headings, cells)


def write_plot(path: Path, results: list[Result]) -> None:
    """Plot steps per second over the number of sessions, both logarithmic. Needs matplotlib (extra `bench`)."""
    from matplotlib import colormaps

    with picture(path, figsize=(8, 4.5)) as (_, axes):
        axes.set_prop_cycle(color=colormaps["tab20"].colors)  # more colours than ways
        for name in dict.fromkeys(result.way for result in results):
            points = sorted((result.sessions, result.steps_per_second) for result in results if result.way == name)
            style = "--" if name in PEERS else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="sessions", ylabel="steps per second")
        counts = sorted({result.sessions for result in results})
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _microseconds(seconds: float) -> str:
    microseconds = seconds * 1e6
    return f"{microseconds:.1f} µs" if microseconds < 100 else f"{microseconds:,.0f} µs"
