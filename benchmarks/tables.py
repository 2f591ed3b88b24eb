"""Program that writes the tables of docs/benchmarks and README.md from the JSON results in docs/benchmarks.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.training.asynchrony import asynchrony_table
from benchmarks.training.comparison import EVALUATION, RETURN, SPENT
from benchmarks.training.experiment import EXPERIMENTS, RESULTS, read_experiment
from benchmarks.training.turn_values import turn_values_table
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. The first column has words, the others numbers."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])


def duration(seconds: float) -> str:
    unit, scale = ("µs", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1)
    return f"{seconds * scale:,.{0 if seconds * scale >= 99.5 else 1}f} {unit}"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def versions(where: Mapping[str, Any]) -> str:
    """Return the packages of a result of `machine`, with their versions."""
    return ", ".join(f"{name} {number}" for name, number in where["versions"].items())


# Serving


def way(name: str, sessions: int, task: str = "throughput") -> Mapping[str, Any] | None:
    """Return the result of a way of stepping with a number of sessions, or None if it was not measured."""
    found = [each for each in figures(task)["results"] if (each["way"], each["sessions"]) == (name, sessions)]
    return found[0] if found else None


def rate(name: str, sessions: int = 256) -> float:
    found = way(name, sessions)
    assert found, f"{name} was not measured with {sessions} sessions"
    return float(found["steps_per_second"])


def overhead(sessions: int) -> float:
    """Return the CPU seconds per step of client and server together, minus those of the in-process loop."""
    served, bare = way("starpod, step_many", sessions), way("in process", sessions)
    assert served
    assert bare
    return float(served["client_cpu_seconds"] + served["server_cpu_seconds"] - bare["client_cpu_seconds"])


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
        met = self.measured >= self.aim if self.least else self.measured <= self.aim
        return [self.what, self.text(self.aim), self.text(self.measured), "met" if met else "missed"]


def times(value: float) -> str:
    return f"{value:.0f} times" if value >= 10 else f"{value:.2f} times"


def aims() -> str:
    many = "starpod, step_many"
    tail = next(each for each in figures("tail")["results"] if each["share"] == 0.7)
    single = {name: way(name, 1) for name in ("starpod, unary, blocking", "starpod, unary")}
    found = [
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
    found.append(
        Aim(
            "two workers beside SyncVectorEnv, 256 sessions",
            1.3,
            rate(f"{many}, 2 workers") / rate("SyncVectorEnv"),
            times,
        )
    )
    found += [
        Aim(
            f"CPU of a step beside the environment, {sessions:,} sessions",
            6e-6,
            overhead(sessions),
            duration,
            least=False,
        )
        for sessions in (256, 1024, 10_000)
    ]
    found.append(Aim("10,000 sessions beside 256", 0.8, rate(many, 10_000) / rate(many), times))
    found.append(Aim("p99.9 over the median at 70 % load", 10, tail["p999"] / tail["p50"], times, least=False))
    found += [
        Aim(f"median of one step: {name}", 400e-6, each["p50_seconds"], duration, least=False)
        for name, each in single.items()
        if each
    ]
    return table(["What", "Aim", "Measured", ""], [each.row for each in found])


def ways() -> str:
    measured = figures("throughput")
    where = measured["machine"]
    counts = (1, 256, 1024, 10_000)
    rows = []
    for name in dict.fromkeys(each["way"] for each in measured["results"]):
        rates = [each and f"{each['steps_per_second']:,.0f}" for each in (way(name, count) for count in counts)]
        one, many = way(name, 1), way(name, 256)
        cells = [duration(one["p50_seconds"])] if one else [""]
        keys = ("p99_seconds", "client_cpu_seconds", "server_cpu_seconds")
        cells += [duration(many[key]) for key in keys] if many else [""] * 3
        cells.append(f"{many['wire_bytes']:.0f}" if many and many["wire_bytes"] >= 1 else "")
        rows.append([name, *(rate or "" for rate in rates), *cells])
    steps = ["1 session", *(f"{count:,}" for count in counts[1:])]
    head = ["Steps/s", *steps, "p50, 1 session", "256: p99", "CPU client", "CPU server", "bytes"]
    made = f"On {where['cores']} cores ({where['processor']}), Python {where['python']}, {versions(where)}."
    return f"{made}\n\n{table(head, rows)}"


def workloads() -> str:
    tasks = ("throughput_wait", "throughput_tail", "throughput_webshop")
    names = dict.fromkeys(each["way"] for task in tasks for each in figures(task)["results"])
    rows = []
    for name in names:
        sessions = 256 if any(way(name, 256, task) for task in tasks) else 64
        found = [way(name, sessions, task) for task in tasks]
        cells = [f"{each['steps_per_second']:,.0f}, {duration(each['p50_seconds'])}" if each else "" for each in found]
        rows.append([name if sessions == 256 else f"{name}, {sessions} sessions", *cells])
    return table(["256 sessions: steps/s, median wait", "5 ms", "heavy tail", "webshop"], rows)


def polling() -> str:
    results = figures("polling")["results"]
    kinds = list(next(iter(results.values())))
    return table(
        ["gRPC alone", *kinds], [[name, *(f"{results[name][kind]:.0f}" for kind in kinds)] for name in results]
    )


def http() -> str:
    results = figures("http")["results"]
    rows = [
        [
            each["way"],
            f"{each['sessions']}",
            f"{each['steps_per_second']:,.0f}",
            duration(each["p50_us"] / 1e6),
            f"{each['server_cpu_us']:.0f}",
        ]
        for each in results
    ]
    return table(["One lake", "Sessions", "Steps/s", "Median wait", "Server's CPU µs per step"], rows)


def gateway() -> str:
    result = figures("gateway")
    cells = [f"{result[key]:.1f} ms" for key in ("p50_ms", "p90_ms", "p99_ms", "cpu_ms")]
    row = [f"{result['sessions']}", f"{result['replies']}", f"{result['longest_prompt']:,}", *cells]
    return table(["Sessions", "Replies", "Longest prompt", "p50 added", "p90", "p99", "CPU of a reply"], [row])


def gateway_kills() -> str:
    engines = {
        "vllm_remote": "in front of a server that stands for vLLM",
        "torch": "with the torch engine",
        "collect.agent.command": "in a run on programs' episodes",
    }
    rows = []
    for name, found in figures("gateway_kills")["results"].items():
        kills = found["kills"]
        environments = sum(count for killed, count in kills.items() if "environments" in killed)
        others = ", ".join(
            f"{count} {killed}" for killed, count in sorted(kills.items()) if "environments" not in killed
        )
        differ = found.get("steps_that_differ", 0) + found["traces_that_differ"]
        rows.append(
            [
                f"A gateway {engines[name]}",
                f"{sum(kills.values())}: {environments} environments, {others}",
                f"{found['episodes']:,}",
                f"{found['turns']:,}",
                f"{found['episodes_lost']}",
                f"{differ}",
            ]
        )
    return table(["", "Kills", "Episodes", "Turns", "Lost", "Differ"], rows)


def tail() -> str:
    return table(
        ["Share of the closed loop's rate", "Steps/s", "p50", "p99", "p99.9", "p99.9 over p50"],
        [
            ["closed loop" if each["share"] == 1 else f"{each['share']:.0%}".replace("%", " %")]
            + [f"{each['steps_per_second']:,.0f}"]
            + [f"{each[key]:.3g} ms" for key in ("p50", "p99", "p999")]
            + [f"{each['p999'] / each['p50']:.2g}"]
            for each in figures("tail")["results"]
        ],
    )


def sessions() -> str:
    return table(
        ["Environment", "Sessions", "Memory of each", "Server's CPU, all idle", "CPU to reap all"],
        [
            [
                each["environment"],
                f"{each['sessions']:,}",
                f"{each['bytes_per_session'] / 1024:.1f} KiB",
                f"{percent(each['idle_cpu'])} of a core",
                f"{each['reap_cpu_seconds']:.2f} s",
            ]
            for each in figures("sessions")["results"]
        ],
    )


def hosting() -> str:
    return table(
        ["FrozenLake-v1, CPU time of the server", "A step", "A session more", "Opening one"],
        [
            [
                "Gymnasium in a loop of one's own" if name == "in process" else name,
                duration(each["step_us"] / 1e6),
                memory(each["session_kb"]) if "session_kb" in each else "",
                duration(each["open_ms"] / 1e3) if "open_ms" in each else "",
            ]
            for name, each in figures("hosting")["results"].items()
        ],
    )


def hub() -> str:
    """Return the table of `starpod hub`, with a row per library of environments."""
    measured = figures("hub")
    families: dict[str, list[Mapping[str, Any]]] = {}
    for each in measured["environments"]:
        families.setdefault(FAMILIES.get(each["id"].partition("-")[0], "Starpod"), []).append(each)
    rows = []
    passed, broken = 0, Counter[str]()
    for family, found in sorted(families.items()):
        checked = [each for each in found if each["seconds"]]
        problems = [each["problem"] for each in checked if not each["passed"]]
        passed += len(checked) - len(problems)
        broken.update(problem.split()[0] for problem in problems)
        seconds, speed = (median(each[name] or 0 for each in checked) for name in ("seconds", "steps_per_second"))
        counts = (str(count) for count in (len(found), len(checked), len(checked) - len(problems)))
        rows.append([family, *counts, f"{seconds:.0f} s", f"{speed:,.0f}"])
    missed, planted, wrong = (measured["planted"][name].values() for name in ("missed", "planted", "wrong"))
    misses = [bug for bugs in missed for bug in bugs]
    rules = ", ".join(f"{rule} ({count})" for rule, count in sorted(broken.items())) or "nothing"
    return "\n\n".join(
        [
            table(["`starpod hub`", "Installed", "Checked", "Pass", "A check, median", "Steps/s, median"], rows),
            f"{passed} pass, in {measured['minutes']:.0f} minutes on {measured['machine']['cores']} cores. What other "
            f"checked ones break: {rules}.",
            f"Of {sum(planted)} planted bugs {sum(planted) - len(misses)} are found (missed: "
            f"{', '.join(misses) or 'none'}); in {measured['planted']['good']} environments without one "
            f"{sum(map(len, wrong)) or 'nothing'}.",
        ]
    )


def memory(kibibytes: float) -> str:
    return f"{kibibytes / 1024:.0f} MiB" if kibibytes >= 1024 else f"{kibibytes:.0f} KiB"


def soak() -> str:
    measured = figures("soak")
    growing = [name for name, trend in measured["trends"].items() if trend["grows"]]
    done = ", ".join(f"{number:,} {name}" for name, number in measured["done"].items())
    return f"{measured['seconds'] / 60:.0f} minutes: {done}. What grows: {', '.join(growing) or 'nothing'}."


# A fleet


def placement() -> str:
    measured = figures("placement")["results"]
    rows: list[list[str]] = []
    for parts in zip(*(each["parts"] for each in measured), strict=True):
        what = parts[0]["what"]
        cells = [duration(part["cpu"] / part["items"]) for part in parts]
        if what == "session":
            cells = [f"{cell}; {part['balance']:.3g}" for cell, part in zip(cells, parts, strict=True)]
        rows.append([f"{parts[0]['name']}: CPU per {what}{'; fullest over mean' * (what == 'session')}", *cells])
    return table(["Servers", *(f"{each['servers']:,}" for each in measured)], rows)


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
        for each in read_runs(name):
            shown = f"`{name}`" + f", {each['variant']}" * (len(experiment.variants) > 1)
            ends = [interval(each["before"]), interval(each["after"])]
            rows.append([shown, str(each["seed"]), *ends, f"{each['seconds']:.0f} s"])
    models = f"Names that begin with `gpu_` or end in `_llm` train {model_title(SMOLLM2)}, the others a tiny policy."
    return f"{models}\n\n{table(['Experiment', 'Seed', 'Before', 'After', 'Wall time'], rows)}"


def reasoning() -> str:
    rows = [
        [name, each["variant"], str(each["seed"]), *(interval(each[key]) for key in ("before", "after", "transfer"))]
        for name, experiment in (("plain", "reasoning_llm"), ("swapped", "swapped_llm"))
        for each in figures(f"learning_{experiment}")
    ]
    return table(["Names", "`starpod train bandit_llm`", "Seed", "Before", "After", "After, names never seen"], rows)


def mixture() -> str:
    rows = []
    for each in figures("learning_mixture"):
        parts = {"mean": each, **each["environments"]}
        for name, own in parts.items():
            reference = own["reference"] if own is each else own["before"]["reference"]
            random = percent(reference["random"]["success"])
            rows.append(
                [each["variant"], str(each["seed"]), name, interval(own["before"]), interval(own["after"]), random]
            )
    return table(["`starpod train mixture`", "Seed", "Environment", "Before", "After", "random"], rows)


def iterations() -> str:
    measured = figures("llm")
    rows = []
    for name, each in measured["results"].items():
        seconds, sampling, sampled = (fmean(each[key]) for key in ("seconds", "sampling", "sampled"))
        alone = f"{sum(each['alone']) / sum(each['inside']):.2f}" if "alone" in each else ""
        cells = [f"{seconds:.1f} s", f"{sampling:.1f} s", alone, f"{sampled / 64:.1f}", f"{each['peak_gib']:.1f} GiB"]
        after = interval(each["evaluations"][-1]) if "evaluations" in each else ""
        rows.append([name, str(len(each["seconds"])), *cells, after])
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
    start = interval(measured["results"]["starpod"]["evaluations"][0])
    return f"{measured['model']}, the same warm-started weights: success {start}.\n\n{table(head, rows)}"


def gpu() -> str:
    dtypes = ("bfloat16", "float32")
    measured = [figures(name) for name in ("gpu_check", "gpu_check_float32")]
    where = measured[0]["machine"]

    def side_by_side(what: str, cells: Sequence[Mapping[str, str]]) -> str:
        names = dict.fromkeys(name for each in cells for name in each)
        return table([what, *dtypes], [[name, *(each.get(name, "") for each in cells)] for name in names])

    gaps = [{c["what"]: f"{c['mean']:.5f}, {c['largest']:.4f}" for c in each["checks"]} for each in measured]
    speeds = [{s["what"]: f"{s['tokens_per_second']:,.0f}" for s in each["speeds"]} for each in measured]
    return "\n\n".join(
        [
            f"On one {where['gpu']}, {where['cores']} cores, Python {where['python']}, {versions(where)}.",
            side_by_side("Sampler against trainer: mean, largest, nats", gaps),
            side_by_side("Per second", speeds),
        ]
    )


def references() -> str:
    jobs = [name for name, experiment in MEASURED.items() if experiment.base == name]
    found = {name: own for name in jobs if (own := read_runs(name)[0]["reference"])}
    policies = list(dict.fromkeys(policy for each in found.values() for policy in each))
    return table(
        ["`starpod train`", *policies],
        [[name, *(percent(own[p]["success"]) if p in own else "" for p in policies)] for name, own in found.items()],
    )


def shopping() -> str:
    runs = figures("learning_webshop")
    rows = [
        [f"seed {each['seed']}, {when}", interval(each[key], "return"), interval(each[key])]
        for each in runs
        for when, key in (("after the warm start", "before"), ("at the end", "after"))
    ]
    rows += [
        [policy, interval(each, "return"), interval(each)]
        for policy, each in runs[0]["reference"].items()
        if "return_low" in each
    ]
    return table(["`starpod train webshop`", "Mean score", "Score of 1"], rows)


def called(run: Mapping[str, Any]) -> str:
    """Return the step at which a run was first warned of the Echo Trap, or "never"."""
    return next((str(each["step"]) for each in run["warnings"] if each["text"].startswith("Echo Trap")), "never")


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
    before = ", ".join(percent(run["before"]["success"]) for run in runs[: len(seeds)])
    head = ["`starpod train echo_trap`", "Success after", "Deviation in groups", "Diversity", "Called at"]
    return f"Before: {before}. Signals are means over the seeds.\n\n{table(head, rows)}"


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
            after = [run["after"][key] for run in seeds]
            cells += [each_seed(after, key), mean_with_interval(after, key)]
            ends = [run["curve"][-1] for run in seeds]
            # The oldest runs did not count forks.
            cells += [f"{fmean(end[spent] for end in ends):,.0f}" if spent in ends[0] else "" for spent in SPENT]
            rows.append([f"`{name}`", variant, *cells])
    spent = [each.capitalize() for each in SPENT]
    head = ["Experiment", "Variant", "Before", "At equal tokens", "After", "Mean after (95 % interval)", *spent]
    shown = "Each seed's success, or its return where there is no sign %."
    equal = "Equal tokens: the fewest that a run of the experiment sampled, on the line between its evaluations."
    return f"{shown} {equal}\n\n{table(head, rows)}"


def each_seed(values: Iterable[float], key: str) -> str:
    if key == "success":
        return ", ".join(percent(each).removesuffix(" %") for each in values) + " %"
    return ", ".join(f"{each:.2f}" for each in values)


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
    points = [(each["sampled tokens"], each[key]) for each in run["curve"]]
    return float(np.interp(tokens, *zip(*points, strict=True)))


def collection() -> str:
    results = figures("collection")["results"]
    rows = []
    for name in dict.fromkeys(each["way"] for each in results):
        rounds = [each for each in results if each["way"] == name]
        seconds = median(each["seconds"] for each in rounds)
        idle = median(each["idle"] for each in rounds)
        rows.append(
            [
                name,
                f"{rounds[0]['episodes'] / seconds:.1f}",
                f"{rounds[0]['steps'] / seconds:.0f}",
                f"{idle:.0%}".replace("%", " %"),
            ]
        )
    ratio = float(rows[1][1]) / float(rows[0][1])
    return table(["Way", "Episodes/s", "Steps/s", "Engine idle"], rows) + f"\n\n{ratio:.1f} times the lock-step rate."


def asynchrony() -> str:
    tiny, pretrained = (table(*asynchrony_table(figures(f"asynchrony{job}"))) for job in ("", "_frozen_lake_llm"))
    return f"A tiny policy:\n\n{tiny}\n\n{model_title(SMOLLM2)}, on a lake of 3 x 3:\n\n{pretrained}"


def turn_values() -> str:
    results = figures("turn_values")["results"]
    seeds = len(results[0]["seeds"])
    made = f"`python -m benchmarks.training.turn_values`: means over {seeds} seeds; errors are mean squares."
    return f"{made}\n\n{table(*turn_values_table(results))}"


# WebShop's search


def search() -> str:
    results = figures("webshop_search")["results"]
    counts = list(dict.fromkeys(each["documents"] for each in results))
    cost = {(each["way"], each["documents"]): each for each in results}
    rows = []
    for name in dict.fromkeys(each["way"] for each in results):
        found = [cost.get((name, count)) for count in counts]
        cells = [
            f"{each['p50_cpu_seconds'] * 1e3:.2g} / {each['p99_cpu_seconds'] * 1e3:.2g}" if each else ""
            for each in found
        ]
        exact = {f"{each['same_top_10']:.0%}".replace("%", "") for each in found if each}
        rows.append([name, *cells, " to ".join(sorted(exact, key=int)) + " %"])
    sizes = ", ".join(f"{each['megabytes']:.0f} MB" for each in results if each["megabytes"])
    head = [
        "CPU of a query in ms, p50 / p99",
        *(f"{count:,} documents" for count in counts),
        "Same first ten as Lucene",
    ]
    return table(head, rows) + f"\n\nThe index takes {sizes}."


def live_site() -> str:
    """Return the table of the live site's pages with many runs and episodes."""
    found = figures("ui")
    rows = [
        (name, *(duration(times[each]) for each in ("first", "slowest", "cpu")))
        for name, times in found["pages"].items()
    ]
    cost = f"{found['indexing_cpu_seconds']:,.0f} s of CPU, {found['index_bytes'] / 2**20:,.0f} MiB"
    return table(["Page", "First after a restart", "Slowest of five", "CPU"], rows) + f"\n\nThe index: {cost}."


PAGES: dict[str, tuple[str, dict[str, Callable[[], str]]]] = {
    "throughput": ("Steps per second", {"Every way": ways}),
    "serving": (
        "Serving",
        {
            "Aims": aims,
            "Slow steps, and a shop": workloads,
            "A message of gRPC": polling,
            "JSON over HTTP": http,
            "A gateway before an engine": gateway,
            "A gateway among kills": gateway_kills,
            "The tail of latency": tail,
            "Ten thousand sessions": sessions,
            "The cost of hosting": hosting,
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
            "Values of turns": turn_values,
            "Collecting from slow environments": collection,
            "Collecting during updates": asynchrony,
        },
    ),
    "webshop_search": ("WebShop's search", {"Queries": search}),
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
    largest = figures("webshop")["results"][-1]
    throughput = "python -m benchmarks.serving.throughput"
    rows = [
        ("What", "Measured", "Command"),
        ("---", "---", "---"),
        ("A frozen lake, 256 sessions in columns", f"{many:,.0f} steps/s", f"`{throughput}`"),
        ("beside OpenEnv as `openenv init` writes it; tuned by hand", "; ".join(peers), f"`{throughput}`"),
        (
            "Half an hour of churn at 70 % load",
            f"{churn['done']['steps']:,} steps, {', '.join(grows) or 'nothing'} grows",
            f"`{churn['command']}`",
        ),
        (
            "`make train`: success before and after, three seeds",
            ", ".join(f"{min(each, key=float)} to {max(each, key=float)} %" for each in ends),
            "`python -m benchmarks.training.experiment frozen_lake`",
        ),
        (
            "SmolLM2-135M on Sokoban, with vLLM on one H200: success before and after six minutes, one seed",
            f"{interval(pretrained['before'])}; {interval(pretrained['after'])}",
            "`python -m benchmarks.training.experiment gpu_sokoban`",
        ),
        (
            f"WebShop, {largest['products']:,} products: search over the wire, median",
            duration(largest["wire"]["search"]["p50"]),
            "`python -m benchmarks.webshop.catalogues`",
        ),
    ]
    return "".join(f"| {' | '.join(cells)} |\n".replace("| --- | --- | --- |", "|---|---|---|") for cells in rows)


def readme() -> str:
    """Return README.md with a new table."""
    above, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    return above + MARKS[0] + chosen() + MARKS[1] + rest.split(MARKS[1])[1]


def main() -> None:
    README.write_text(readme(), encoding="utf-8")
    for name in NAMES:
        (RESULTS / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
