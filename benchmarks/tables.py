"""Program that writes the tables of docs/benchmarks and README.md from the JSON results in docs/benchmarks.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.results import RESULTS, Columns, cells_of, duration, percent
from benchmarks.results import markdown_table as table
from benchmarks.serving import gateway, http, machine_faults, machines, sessions, tail
from benchmarks.training.asynchrony import asynchrony_table
from benchmarks.training.collection import COLLECTION_HEAD, collection_rows
from benchmarks.training.comparison import EVALUATION, RETURN, SPENT
from benchmarks.training.experiment import EXPERIMENTS, read_experiment
from benchmarks.ui.scale import PAGES_HEAD
from benchmarks.webshop import report
from starpod.trainer.evaluation.statistics import mean_interval
from starpod.trainer.models.config import SMOLLM2, model_title

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FAMILIES = {
    "gymnasium": "Gymnasium and MiniGrid",
    "reasoning": "Reasoning Gym",
    "textarena": "TextArena",
    "textworld": "TextWorld",
}
"""Libraries of hosted environments, by the beginning of their ids."""
MARKS = ("<!-- figures -->\n", "<!-- end of figures -->")
"""Comments around the table in README.md."""


@cache
def figures(name: str) -> Any:
    """Return the content of docs/benchmarks/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def versions(where: Mapping[str, Any]) -> str:
    """Return the packages of a result of `machine`, with their versions."""
    return ", ".join(f"{name} {number}" for name, number in where["versions"].items())


def rows_of(name: str, columns: Columns) -> str:
    """Return a table with a row for each result in docs/benchmarks/NAME.json, or for the only one."""
    data = figures(name)
    return table(list(columns), cells_of(data.get("results", [data]), columns))


# Serving


def way(name: str, sessions: int, task: str = "throughput") -> Mapping[str, Any] | None:
    """Return the result of a way of stepping with a number of sessions, or None if it was not measured."""
    rows = [row for row in figures(task)["results"] if (row["way"], row["sessions"]) == (name, sessions)]
    return rows[0] if rows else None


def rate(name: str, sessions: int = 256) -> float:
    result = way(name, sessions)
    assert result, f"{name} was not measured with {sessions} sessions"
    return float(result["steps_per_second"])


def overhead(sessions: int) -> float:
    """Return the CPU seconds per step of client and server together, minus those of the in-process loop."""
    service, baseline = way("starpod, step_many", sessions), way("in process", sessions)
    assert service
    assert baseline
    return float(service["client_cpu_seconds"] + service["server_cpu_seconds"] - baseline["client_cpu_seconds"])


@dataclass(frozen=True, slots=True)
class Aim:
    """A target and its measurement. least: whether the target is a minimum."""

    what: str
    aim: float
    measured: float
    text: Callable[[float], str]
    least: bool = True

    @property
    def row(self) -> list[str]:
        is_met = self.measured >= self.aim if self.least else self.measured <= self.aim
        return [self.what, self.text(self.aim), self.text(self.measured), "met" if is_met else "missed"]


def times(value: float) -> str:
    return f"{value:.0f} times" if value >= 10 else f"{value:.2f} times"


def aims() -> str:
    many = "starpod, step_many"
    tail = next(row for row in figures("tail")["results"] if row["share"] == 0.7)
    single = {name: way(name, 1) for name in ("starpod, unary, blocking", "starpod, unary")}
    aims = [
        Aim(f"step_many beside {peer}, {sessions:,} sessions", aim, rate(many, sessions) / rate(peer, sessions), times)
        for peer, aim, counts in (
            ("OpenEnv", 40, (256, 1024)),
            ("OpenEnv, tuned", 40, (256,)),
            ("dm-env-rpc", 50, (256,)),
            ("dm-env-rpc, tuned", 50, (256,)),
            ("SyncVectorEnv", 0.75, (256, 1024)),
            ("in process", 0.75, (256,)),
        )
        for sessions in counts
    ]
    aims.append(
        Aim(
            "two workers beside SyncVectorEnv, 256 sessions",
            1.3,
            rate(f"{many}, 2 workers") / rate("SyncVectorEnv"),
            times,
        )
    )
    aims += [
        Aim(
            f"CPU of a step beside the environment, {sessions:,} sessions",
            6e-6,
            overhead(sessions),
            duration,
            least=False,
        )
        for sessions in (256, 1024, 10_000)
    ]
    aims.append(Aim("10,000 sessions beside 256", 0.8, rate(many, 10_000) / rate(many), times))
    aims.append(Aim("p99.9 over the median at 70 % load", 10, tail["p999"] / tail["p50"], times, least=False))
    aims += [
        Aim(f"median of one step: {name}", 400e-6, row["p50_seconds"], duration, least=False)
        for name, row in single.items()
        if row
    ]
    return table(["What", "Aim", "Measured", ""], [aim.row for aim in aims])


def ways() -> str:
    data = figures("throughput")
    host = data["machine"]
    counts = (1, 256, 1024, 10_000)
    rows = []
    for name in dict.fromkeys(row["way"] for row in data["results"]):
        rates = [row and f"{row['steps_per_second']:,.0f}" for row in (way(name, count) for count in counts)]
        one, many = way(name, 1), way(name, 256)
        cells = [duration(one["p50_seconds"])] if one else [""]
        keys = ("p99_seconds", "client_cpu_seconds", "server_cpu_seconds")
        cells += [duration(many[key]) for key in keys] if many else [""] * 3
        cells.append(f"{many['wire_bytes']:.0f}" if many and many["wire_bytes"] >= 1 else "")
        rows.append([name, *(rate or "" for rate in rates), *cells])
    steps = ["1 session", *(f"{count:,}" for count in counts[1:])]
    head = ["Steps/s", *steps, "p50, 1 session", "256: p99", "CPU client", "CPU server", "bytes"]
    note = f"On {host['cores']} cores ({host['processor']}), Python {host['python']}, {versions(host)}."
    return f"{note}\n\n{table(head, rows)}"


USER: Columns = {
    "Way": lambda row: row["way"],
    "Sessions": lambda row: f"{row['sessions']:,}",
    "calls/s": lambda row: f"{row['steps_per_second']:,.0f}",
    "median step": lambda row: duration(row["p50_seconds"]),
    "CPU client": lambda row: duration(row["client_cpu_seconds"]),
    "CPU server": lambda row: duration(row["server_cpu_seconds"]) if row["server_cpu_seconds"] else "",
}


def workloads() -> str:
    tasks = ("throughput_wait", "throughput_tail", "throughput_webshop")
    names = dict.fromkeys(row["way"] for task in tasks for row in figures(task)["results"])
    rows = []
    for name in names:
        sessions = 256 if any(way(name, 256, task) for task in tasks) else 64
        results = [way(name, sessions, task) for task in tasks]
        cells = [f"{row['steps_per_second']:,.0f}, {duration(row['p50_seconds'])}" if row else "" for row in results]
        rows.append([name if sessions == 256 else f"{name}, {sessions} sessions", *cells])
    return table(["256 sessions: steps/s, median wait", "5 ms", "heavy tail", "webshop"], rows)


def gateway_kills() -> str:
    engines = {
        "vllm_remote": "in front of a server that stands for vLLM",
        "torch": "with the torch engine",
        "collect.agent.command": "in a run on programs' episodes",
    }
    rows = []
    for name, result in figures("gateway_kills")["results"].items():
        kills = result["kills"]
        environments = sum(count for target, count in kills.items() if "environments" in target)
        other_kills = ", ".join(
            f"{count} {target}" for target, count in sorted(kills.items()) if "environments" not in target
        )
        differences = result.get("steps_that_differ", 0) + result["traces_that_differ"]
        rows.append(
            [
                f"A gateway {engines[name]}",
                f"{sum(kills.values())}: {environments} environments, {other_kills}",
                f"{result['episodes']:,}",
                f"{result['turns']:,}",
                f"{result['episodes_lost']}",
                f"{differences}",
            ]
        )
    return table(["", "Kills", "Episodes", "Turns", "Lost", "Differ"], rows)


def hub() -> str:
    """Return the table of `starpod hub`, with a row per library of environments."""
    data = figures("hub")
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["environments"]:
        families.setdefault(FAMILIES.get(row["id"].partition("-")[0], "Starpod"), []).append(row)
    rows = []
    passed_count, broken_rules = 0, Counter[str]()
    for family, group in sorted(families.items()):
        checked = [row for row in group if row["seconds"]]
        problems = [row["problem"] for row in checked if not row["passed"]]
        passed_count += len(checked) - len(problems)
        broken_rules.update(problem.split()[0] for problem in problems)
        seconds, speed = (median(row[name] or 0 for row in checked) for name in ("seconds", "steps_per_second"))
        counts = (str(count) for count in (len(group), len(checked), len(checked) - len(problems)))
        rows.append([family, *counts, f"{seconds:.0f} s", f"{speed:,.0f}"])
    missed, planted, wrong = (data["planted"][name].values() for name in ("missed", "planted", "wrong"))
    misses = [bug for bugs in missed for bug in bugs]
    rules = ", ".join(f"{rule} ({count})" for rule, count in sorted(broken_rules.items())) or "nothing"
    return "\n\n".join(
        [
            table(["`starpod hub`", "Installed", "Checked", "Pass", "A check, median", "Steps/s, median"], rows),
            f"{passed_count} pass, in {data['minutes']:.0f} minutes on {data['machine']['cores']} cores. What other "
            f"checked ones break: {rules}.",
            f"Of {sum(planted)} planted bugs {sum(planted) - len(misses)} are found (missed: "
            f"{', '.join(misses) or 'none'}); in {data['planted']['good']} environments without one "
            f"{sum(map(len, wrong)) or 'nothing'}.",
        ]
    )


def soak() -> str:
    data = figures("soak")
    names = [name for name, trend in data["trends"].items() if trend["grows"]]
    counts = ", ".join(f"{number:,} {name}" for name, number in data["done"].items())
    return f"{data['seconds'] / 60:.0f} minutes: {counts}. What grows: {', '.join(names) or 'nothing'}."


# A fleet


def placement() -> str:
    results = figures("placement")["results"]
    rows: list[list[str]] = []
    for parts in zip(*(result["parts"] for result in results), strict=True):
        unit = parts[0]["what"]
        cells = [duration(part["cpu"] / part["items"]) for part in parts]
        if unit == "session":
            cells = [f"{cell}; {part['balance']:.3g}" for cell, part in zip(cells, parts, strict=True)]
        rows.append([f"{parts[0]['name']}: CPU per {unit}{'; fullest over mean' * (unit == 'session')}", *cells])
    return table(["Servers", *(f"{result['servers']:,}" for result in results)], rows)


# Training


def interval(summary: Mapping[str, float], key: str = "success") -> str:
    if key == "success":
        low, high = (percent(summary[f"success_{end}"]).removesuffix(" %") for end in ("low", "high"))
        return f"{percent(summary['success'])} ({low} to {high})"
    return f"{summary['return_mean']:.3f} ({summary['return_low']:.3f} to {summary['return_high']:.3f})"


def read_runs(name: str) -> list[Any]:
    """Return the runs of an experiment; empty if it has not been run."""
    return figures(f"learning_{name}") if (RESULTS / f"learning_{name}.json").exists() else []


MEASURED = {name: read_experiment(path) for name, path in EXPERIMENTS.items() if read_runs(name)}
"""Experiments that have results."""


def experiments() -> str:
    """Return the list of all experiments. The oldest results do not name their commit."""
    rows = []
    for name, path in EXPERIMENTS.items():
        experiment, runs = read_experiment(path), read_runs(name)
        seeds = str(len({run["seed"] for run in runs})) if runs else "not yet run"
        commits = dict.fromkeys(run["origin"]["commit"] for run in runs if run.get("origin"))
        rows.append([f"`{name}`", experiment.question, experiment.machine, seeds, ", ".join(commits)])
    head = table(["Name", "Question", "Machine", "Seeds", "Commit"], rows)
    return f"`python -m benchmarks.training.experiment NAME` repeats one.\n\n{head}"


def learning() -> str:
    rows = []
    for name, experiment in MEASURED.items():
        if experiment.over != "iterations" or experiment.metrics != (EVALUATION,) or experiment.transfer:
            continue
        for run in read_runs(name):
            label = f"`{name}`" + f", {run['variant']}" * (len(experiment.variants) > 1)
            ends = [interval(run["before"]), interval(run["after"])]
            rows.append([label, str(run["seed"]), *ends, f"{run['seconds']:.0f} s"])
    models = (
        f"Names that begin with `gpu_` or end in `_llm` train {model_title(SMOLLM2)}, the others a tiny policy. "
        "Runs of SmolLM2, apart from the shop's, were "
        "[measured with older settings](../benchmarks.md#a-pretrained-model) of their jobs."
    )
    return f"{models}\n\n{table(['Experiment', 'Seed', 'Before', 'After', 'Wall time'], rows)}"


def reasoning() -> str:
    rows = [
        [name, run["variant"], str(run["seed"]), *(interval(run[key]) for key in ("before", "after", "transfer"))]
        for name, experiment in (("plain", "reasoning_llm"), ("swapped", "swapped_llm"))
        for run in figures(f"learning_{experiment}")
    ]
    return table(["Names", "`starpod train bandit_llm`", "Seed", "Before", "After", "After, names never seen"], rows)


def mixture() -> str:
    rows = []
    for run in figures("learning_mixture"):
        parts = {"mean": run, **run["environments"]}
        for name, part in parts.items():
            reference = part["reference"] if part is run else part["before"]["reference"]
            random = percent(reference["random"]["success"])
            rows.append(
                [run["variant"], str(run["seed"]), name, interval(part["before"]), interval(part["after"]), random]
            )
    return table(["`starpod train mixture`", "Seed", "Environment", "Before", "After", "random"], rows)


def iterations() -> str:
    data = figures("llm")
    rows = []
    for name, result in data["results"].items():
        seconds, sampling, sampled = (fmean(result[key]) for key in ("seconds", "sampling", "sampled"))
        ratio = f"{sum(result['alone']) / sum(result['inside']):.2f}" if "alone" in result else ""
        cells = [f"{seconds:.1f} s", f"{sampling:.1f} s", ratio, f"{sampled / 64:.1f}", f"{result['peak_gib']:.1f} GiB"]
        success = interval(result["evaluations"][-1]) if "evaluations" in result else ""
        rows.append([name, str(len(result["seconds"])), *cells, success])
    head = [
        "64 episodes, two threads",
        "Iterations",
        "Seconds of one",
        "of which sampling",
        "rate beside the engine alone",
        "Tokens of a reply",
        "Peak memory",
        "Success afterwards",
    ]
    start = interval(data["results"]["starpod"]["evaluations"][0])
    return f"{data['model']}, the same warm-started weights: success {start}.\n\n{table(head, rows)}"


def gpu() -> str:
    dtypes = ("bfloat16", "float32")
    reports = [figures(name) for name in ("gpu_check", "gpu_check_float32")]
    host = reports[0]["machine"]

    def side_by_side(what: str, cells: Sequence[Mapping[str, str]]) -> str:
        names = dict.fromkeys(name for cell in cells for name in cell)
        return table([what, *dtypes], [[name, *(cell.get(name, "") for cell in cells)] for name in names])

    gaps = [{c["what"]: f"{c['mean']:.5f}, {c['largest']:.4f}" for c in report["checks"]} for report in reports]
    speeds = [{s["what"]: f"{s['tokens_per_second']:,.0f}" for s in report["speeds"]} for report in reports]
    return "\n\n".join(
        [
            f"On one {host['gpu']}, {host['cores']} cores, Python {host['python']}, {versions(host)}.",
            side_by_side("Sampler against trainer: mean, largest, nats", gaps),
            side_by_side("Per second", speeds),
        ]
    )


def references() -> str:
    jobs = [name for name, experiment in MEASURED.items() if experiment.base == name]
    rows = {name: row for name in jobs if (row := read_runs(name)[0]["reference"])}
    policies = list(dict.fromkeys(policy for row in rows.values() for policy in row))
    return table(
        ["`starpod train`", *policies],
        [[name, *(percent(row[p]["success"]) if p in row else "" for p in policies)] for name, row in rows.items()],
    )


def shopping() -> str:
    runs = figures("learning_webshop")
    rows = [
        [f"seed {run['seed']}, {when}", interval(run[key], "return"), interval(run[key])]
        for run in runs
        for when, key in (("after the warm start", "before"), ("at the end", "after"))
    ]
    rows += [
        [policy, interval(result, "return"), interval(result)]
        for policy, result in runs[0]["reference"].items()
        if "return_low" in result
    ]
    return table(["`starpod train webshop`", "Mean score", "Score of 1"], rows)


def called(run: Mapping[str, Any]) -> str:
    """Return the step at which a run was first warned of the Echo Trap, or "never"."""
    return next((str(entry["step"]) for entry in run["warnings"] if entry["text"].startswith("Echo Trap")), "never")


def echo_trap() -> str:
    runs = [run for name in ("echo_trap", "echo_trap_parts", "echo_trap_turns") for run in read_runs(name)]
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        seeds = [run for run in runs if run["variant"] == name]
        signals = [
            " → ".join(f"{fmean(run['signals'][signal][when] for run in seeds):.2f}" for when in ("start", "end"))
            for signal in ("reward_std", "diversity")
        ]
        success = ", ".join(percent(run["after"]["success"]).removesuffix(" %") for run in seeds)
        steps = [called(run) for run in seeds]
        rows.append([name, f"{success} %", *signals, ", ".join(steps) if len(set(steps)) > 1 else steps[0]])
    rates = ", ".join(percent(run["before"]["success"]) for run in runs[: len(seeds)])
    head = ["`starpod train echo_trap`", "Success after", "Deviation in groups", "Diversity", "Called at"]
    return f"Before: {rates}. Signals are means over the seeds.\n\n{table(head, rows)}"


def methods() -> str:
    rows = []
    for name, experiment in MEASURED.items():
        runs = read_runs(name)
        if experiment.over != "resources" or "curve" not in runs[0]:  # the oldest results have none
            continue
        key = "return_mean" if experiment.metrics[0] == RETURN else "success"
        tokens = min(run["curve"][-1]["sampled tokens"] for run in runs)
        for variant in dict.fromkeys(run["variant"] for run in runs):
            seeds = [run for run in runs if run["variant"] == variant]
            at_equal = [at_tokens(run, tokens, key) for run in seeds]
            cells = [each_seed([run["before"][key] for run in seeds], key), each_seed(at_equal, key)]
            values = [run["after"][key] for run in seeds]
            cells += [each_seed(values, key), mean_with_interval(values, key)]
            ends = [run["curve"][-1] for run in seeds]
            # The oldest runs did not count forks.
            cells += [f"{fmean(end[axis] for end in ends):,.0f}" if axis in ends[0] else "" for axis in SPENT]
            rows.append([f"`{name}`", variant, *cells])
    headings = [axis.capitalize() for axis in SPENT]
    head = ["Experiment", "Variant", "Before", "At equal tokens", "After", "Mean after (95 % interval)", *headings]
    note = "Each seed's success, or its return where there is no sign %."
    equal = "Equal tokens: the fewest that a run of the experiment sampled, on the line between its evaluations."
    return f"{note} {equal}\n\n{table(head, rows)}"


def each_seed(values: Iterable[float], key: str) -> str:
    if key == "success":
        return ", ".join(percent(value).removesuffix(" %") for value in values) + " %"
    return ", ".join(f"{value:.2f}" for value in values)


def mean_with_interval(values: Sequence[float], key: str) -> str:
    """Return the mean over seeds with Student's interval, clipped to [0, 1] if it is a success; empty for one seed."""
    if len(values) < 2:
        return ""
    low, high = mean_interval(values)
    if key == "success":
        return interval({"success": fmean(values), "success_low": max(low, 0), "success_high": min(high, 1)})
    return interval({"return_mean": fmean(values), "return_low": low, "return_high": high}, key)


def at_tokens(run: Mapping[str, Any], tokens: float, key: str) -> float:
    """Return a metric of a run's evaluations, interpolated at a number of sampled tokens."""
    points = [(point["sampled tokens"], point[key]) for point in run["curve"]]
    return float(np.interp(tokens, *zip(*points, strict=True)))


def collection() -> str:
    rows = collection_rows(figures("collection")["results"])
    ratio = float(rows[1][1]) / float(rows[0][1])
    return f"{table(COLLECTION_HEAD, rows)}\n\n{ratio:.1f} times the lock-step rate."


def asynchrony() -> str:
    tiny, pretrained = (table(*asynchrony_table(figures(f"asynchrony{job}"))) for job in ("", "_frozen_lake_llm"))
    return f"A tiny policy:\n\n{tiny}\n\n{model_title(SMOLLM2)}, on a lake of 3 x 3:\n\n{pretrained}"


# The live site


def live_site() -> str:
    """Return the table of the live site's pages with many runs and episodes."""
    report = figures("ui")
    rows = [
        (name, *(duration(times[key]) for key in ("first", "slowest", "cpu")))
        for name, times in report["pages"].items()
    ]
    cost = f"{report['indexing_cpu_seconds']:,.0f} s of CPU, {report['index_bytes'] / 2**20:,.0f} MiB"
    return table(PAGES_HEAD, rows) + f"\n\nThe index: {cost}."


PAGES: dict[str, tuple[str, dict[str, Callable[[], str]]]] = {
    "throughput": (
        "Steps per second",
        {"Every way": ways, "As a user calls it": lambda: rows_of("throughput_user", USER)},
    ),
    "serving": (
        "Serving",
        {
            "Aims": aims,
            "Slow steps, and a shop": workloads,
            "JSON over HTTP": partial(rows_of, "http", http.COLUMNS),
            "A gateway before an engine": partial(rows_of, "gateway", gateway.COLUMNS),
            "A gateway among kills": gateway_kills,
            "Tasks in containers": partial(rows_of, "machines", machines.COLUMNS),
            "Faults of tasks in containers": partial(rows_of, "machine_faults", machine_faults.COLUMNS),
            "The tail of latency": partial(rows_of, "tail", tail.COLUMNS),
            "Ten thousand sessions": partial(rows_of, "sessions", sessions.COLUMNS),
            "Every environment that is installed": hub,
            "Thirty minutes": soak,
            "A thousand servers": placement,
        },
    ),
    "training": (
        "Training",
        {
            "Experiments": experiments,
            "Success": learning,
            "Policies without a model": references,
            "With and without reasoning": reasoning,
            "Several environments in one run": mixture,
            "An iteration with a pretrained model": iterations,
            "On a GPU": gpu,
            "Shopping": shopping,
            "The Echo Trap": echo_trap,
            "Methods": methods,
            "Collecting from slow environments": collection,
            "Collecting during updates": asynchrony,
        },
    ),
    "ui": ("The live site", {"Pages": live_site}),
}


NAMES = (*PAGES, "webshop")


def page(name: str) -> str:
    """Return a page of tables as Markdown."""
    if name == "webshop":
        return report.page(RESULTS / "webshop.json")
    title, sections = PAGES[name]
    parts = [f"# {title}: figures", "Made by `python -m benchmarks.tables`; [what they mean](../benchmarks.md)."]
    parts += [part for heading, build in sections.items() for part in (f"## {heading}", build())]
    return "\n\n".join(parts) + "\n"


def chosen() -> str:
    """Return the table of README.md: a few results, and the commands that measure them."""
    many, churn, runs = rate("starpod, step_many"), figures("soak"), figures("learning_frozen_lake")
    peers = [times(many / rate(peer)) for peer in ("OpenEnv", "OpenEnv, tuned")]
    grows = [name for name, trend in churn["trends"].items() if trend["grows"]]
    ends = [[percent(run[when]["success"]).removesuffix(" %") for run in runs] for when in ("before", "after")]
    (pretrained,) = figures("learning_gpu_sokoban")
    catalogue = figures("webshop")["results"][-1]
    throughput = "python -m benchmarks.serving.throughput"
    rows = [
        ("What", "Measured", "Command"),
        ("---", "---", "---"),
        ("A frozen lake, 256 sessions in columns", f"{many:,.0f} steps/s", f"`{throughput}`"),
        (
            "the same, as a multiple of OpenEnv as `openenv init` writes it; tuned by hand",
            "; ".join(peers),
            f"`{throughput}`",
        ),
        (
            "Half an hour of churn at 70 % load",
            f"{churn['done']['steps']:,} steps, {', '.join(grows) or 'nothing'} grows",
            f"`{churn['command']}`",
        ),
        (
            "`make train`: success before; after, lowest to highest of three seeds",
            "; ".join(f"{min(rates, key=float)} to {max(rates, key=float)} %" for rates in ends),
            "`python -m benchmarks.training.experiment frozen_lake`",
        ),
        (
            "SmolLM2-135M on Sokoban, six minutes on an H200: success at temperature 0.5 before; after (95 % "
            "interval), one seed",
            f"{interval(pretrained['before'])}; {interval(pretrained['after'])}",
            "`python -m benchmarks.training.experiment gpu_sokoban`",
        ),
        (
            f"WebShop, {catalogue['products']:,} products: search over the wire, median",
            duration(catalogue["wire"]["search"]["p50"]),
            "`python -m benchmarks.webshop.catalogues`",
        ),
    ]
    return "".join(f"| {' | '.join(cells)} |\n".replace("| --- | --- | --- |", "|---|---|---|") for cells in rows)


def readme() -> str:
    """Return README.md with a new table."""
    head, tail = README.read_text(encoding="utf-8").split(MARKS[0])
    return head + MARKS[0] + chosen() + MARKS[1] + tail.split(MARKS[1])[1]


def main() -> None:
    README.write_text(readme(), encoding="utf-8")
    for name in NAMES:
        (RESULTS / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
