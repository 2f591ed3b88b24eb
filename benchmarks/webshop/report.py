"""Results of the WebShop benchmark: tables on the terminal, JSON, Markdown and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from benchmarks.results import markdown_table, picture, print_table
from benchmarks.webshop.episodes import BUY, RESET, SEARCH
from benchmarks.webshop.original import CLICKS, HOW, ORIGINAL, STEPS_PER_SECOND
from benchmarks.webshop.wire import Load, Start

MB = 1e6
LARGE = 1_000_000
"""Minimum number of products to which the targets for the full catalogue apply."""


@dataclass(frozen=True, slots=True)
class Build:
    """Cost of building a store. peak_bytes: largest resident set, including mapped files."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Latency in seconds of `count` steps of a kind."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Speed in an observation mode: medians over the rounds, and the rate of each round. CPU is per step."""

    mode: str
    sessions: int
    steps_per_second: float
    p50_seconds: float
    p99_seconds: float
    client_cpu_seconds: float
    server_cpu_seconds: float
    rounds: list[float]

    @classmethod
    def of(cls, mode: str, sessions: int, loads: Sequence[Load]) -> Steps:
        """Return the medians of several rounds.

        Args:
            mode: format of the observations.
            sessions: number of sessions.
            loads: measurement of each round; at least one.
        """
        rates = [load.steps_per_second for load in loads]
        p50, p99, client, server = (
            median(getattr(load, name) for load in loads) for name in ("p50", "p99", "client_cpu", "server_cpu")
        )
        return cls(mode, sessions, median(rates), p50, p99, client, server, rates)


@dataclass(frozen=True, slots=True)
class Result:
    """All measurements of one catalogue.

    build: None if the store existed before. start: medians. memory: private bytes of each process, by situation. wire:
    latencies by kind of action, over the wire in one session.
    """

    products: int
    store_bytes: int
    build: Build | None
    start: Start
    memory: dict[str, list[int]]
    wire: dict[str, Wait]
    steps: list[Steps]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table. The first column has words, the others numbers."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def sheets(results: Sequence[Result]) -> list[Sheet]:
    return [aims(results), stores(results), memory(results), latency(results), throughput(results)]


# --- the tables --------------------------------------------------------------------------------------------------


def aims(results: Sequence[Result]) -> Sheet:
    """Return the targets and results for the measured catalogues."""
    rows: list[list[str]] = []

    def add(result: Result, aim: str, shown: str, reached: bool) -> None:
        rows.append([f"{aim}, {result.products:,} products", shown, "met" if reached else "missed"])

    for result in results:
        if result.products >= LARGE:
            for aim, value, limit, form in _large_aims(result):
                add(result, aim, form(value), value < limit)
        elif result.products == 1_000 and _text(result).sessions == 256:
            rate = _text(result).steps_per_second
            add(result, "7,000 steps/s, 256 sessions", f"{rate:,.0f}", rate >= 7_000)
    return Sheet("Aims", ["Aim", "Measured", ""], rows)


def _large_aims(result: Result) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    yield "warm start under 2 s, to the first Open", result.start.first_open, 2.0, _seconds
    workers = next(usage for name, usage in result.memory.items() if "workers, used" in name)
    yield "private memory of a worker under 400 MB", max(workers), 400 * MB, _megabytes
    yield "search under 10 ms at p50, over the wire", result.wire[SEARCH].p50, 10e-3, _milliseconds
    yield "search under 40 ms at p99, over the wire", result.wire[SEARCH].p99, 40e-3, _milliseconds
    if result.build:
        yield "build under 15 min", result.build.seconds, 900.0, _seconds


def stores(results: Sequence[Result]) -> Sheet:
    headings = ["Products", "Build", "Its memory", "Store", "Start: ready", "first Open", "CPU", "Original's start"]
    rows = []
    for result in results:
        build, original = result.build, ORIGINAL.get(result.products)
        rows.append(
            [
                f"{result.products:,}",
                _seconds(build.seconds) if build else "",
                _megabytes(build.peak_bytes) if build else "",
                _megabytes(result.store_bytes),
                *(_seconds(seconds) for seconds in (result.start.ready, result.start.first_open, result.start.cpu)),
                f"{original.start[0]} to {original.start[1]} s" if original else "",
            ]
        )
    return Sheet("Build and start", headings, rows)


def memory(results: Sequence[Result]) -> Sheet:
    """Return the private memory of each process; for the original WebShop, its resident set."""
    rows = []
    for situation in results[0].memory:
        cells = [situation]
        for result in results:
            cells.append(_megabytes(max(result.memory[situation])))
            if original := ORIGINAL.get(result.products):
                resident = dict(zip(("one server, started", "one server, used"), original.resident, strict=True))
                cells.append(f"{resident[situation]:,} MB" if situation in resident else "")
        rows.append(cells)
    return Sheet("Memory", ["Process", *_sizes(results)], rows)


def _sizes(results: Sequence[Result]) -> list[str]:
    """Return a heading per catalogue, and one for the original WebShop if it was measured with as many products."""
    headings = []
    for result in results:
        headings += [f"{result.products:,} products", *(["original"] if result.products in ORIGINAL else [])]
    return headings


def latency(results: Sequence[Result]) -> Sheet:
    rows = []
    for kind in (SEARCH, CLICKS, BUY, RESET):
        cells = [kind]
        for result in results:
            wait = result.wire[kind]
            cells.append(f"{_milliseconds(wait.p50)} / {_milliseconds(wait.p99)}")
            if original := ORIGINAL.get(result.products):
                cells.append("{} / {} ms".format(*original.waits[kind]))
        rows.append(cells)
    return Sheet("What a step takes, p50 / p99", ["Step", *_sizes(results)], rows)


def throughput(results: Sequence[Result]) -> Sheet:
    headings = [
        "Products, observation",
        "Sessions",
        "Steps/s",
        "p50",
        "p99",
        "CPU: server",
        "client",
        "Ours / original",
    ]
    rows = [
        [
            f"{result.products:,}, {load.mode}",
            f"{load.sessions:,}",
            f"{load.steps_per_second:,.0f}",
            *(_milliseconds(wait) for wait in (load.p50_seconds, load.p99_seconds)),
            *(f"{cpu * 1e6:,.0f} µs" for cpu in (load.server_cpu_seconds, load.client_cpu_seconds)),
            f"{load.steps_per_second / STEPS_PER_SECOND:,.0f}" if load.mode == "text" else "",
        ]
        for result in results
        for load in result.steps
    ]
    return Sheet("Steps per second over the wire", headings, rows)


def _text(result: Result) -> Steps:
    return next(load for load in result.steps if load.mode == "text")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 60 else f"{value / 60:.1f} min"


def _megabytes(value: float) -> str:
    return f"{value / MB:,.1f} MB" if value < 10 * MB else f"{value / MB:,.0f} MB"


def _milliseconds(value: float) -> str:
    return f"{value * 1e6:,.0f} µs" if value < 1e-3 else f"{value * 1e3:,.1f} ms"


# --- output ------------------------------------------------------------------------------------------------------


def print_tables(results: Sequence[Result]) -> None:
    for sheet in sheets(results):
        if sheet.rows:
            print_table(sheet.headings, sheet.rows, sheet.title)


def write(path: Path, results: Sequence[Result], where: dict[str, Any]) -> None:
    """Write JSON to `path`, and Markdown and the plot beside it. The plot needs matplotlib (extra `bench`).

    Args:
        path: file with the suffix `.json`; its folder is created.
        results: measurements of each store.
        where: facts about commit and machine, as `origin` returns them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**where, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=2) + "\n")
    path.with_suffix(".md").write_text(page(path), encoding="utf-8")
    _plot(path.with_suffix(".svg"), results)


def page(path: Path) -> str:
    """Return the tables of a JSON file as Markdown."""
    content = json.loads(path.read_text(encoding="utf-8"))
    host, packages = content["machine"], content["machine"]["versions"]
    names = (name for name in ("starpod", "grpcio", "numpy", "numba", "textblob", "scipy") if name in packages)
    versions = ", ".join(f"{name} {packages[name]}" for name in names)
    lines = [
        "# WebShop: figures",
        "",
        f"Made by `{content['command']}`; [what they mean](../benchmarks.md#webshop). On {host['cores']} cores "
        f"({host['processor']}), Python {host['python']}, {versions}.",
        "",
        HOW,
    ]
    for sheet in sheets(TypeAdapter(list[Result]).validate_python(content["results"])):
        if sheet.rows:
            lines += ["", f"## {sheet.title}", "", markdown_table(sheet.headings, sheet.rows)]
    return "\n".join(lines) + "\n"


def _plot(path: Path, results: Sequence[Result]) -> None:
    """Plot latencies and steps per second over the number of products."""
    with picture(path, columns=2, figsize=(10, 4.5)) as (_, (left, right)):
        sizes = [result.products for result in results]
        products = sorted(ORIGINAL)
        for kind, colour in ((SEARCH, "C0"), (CLICKS, "C1")):
            for name, style in (("p50", "-"), ("p99", ":")):
                times = [getattr(result.wire[kind], name) * 1e3 for result in results]
                left.plot(sizes, times, style, marker="o", color=colour, label=f"{kind}, {name}")
            original_times = [ORIGINAL[size].waits[kind][0] for size in products]
            left.plot(
                products, original_times, "--", color=colour, alpha=0.6, label=f"{kind}, p50, original in process"
            )
        left.set(xscale="log", yscale="log", xlabel="products", ylabel="milliseconds, ours over the wire")
        right.plot(sizes, [_text(result).steps_per_second for result in results], "-o", label="text")
        for mode in ("text_rich", "html"):
            points = [
                (result.products, load.steps_per_second)
                for result in results
                for load in result.steps
                if load.mode == mode
            ]
            right.plot(*zip(*points, strict=True), "o", label=mode)
        right.axhline(STEPS_PER_SECOND, linestyle="--", color="grey", label="original in process, one core")
        right.set(
            xscale="log",
            yscale="log",
            xlabel="products",
            ylabel=f"steps per second, {results[0].steps[0].sessions} sessions",
        )
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.minorticks_off()
            axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
