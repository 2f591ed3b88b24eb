"""Learning curves: complete training runs over several seeds, and the pictures of docs/benchmarks.md.

    python -m benchmarks.training.experiment                       what there is
    python -m benchmarks.training.experiment credit --dry-run      what would run
    python -m benchmarks.training.experiment credit --seeds 8
    python -m benchmarks.training.experiment my.yaml               an experiment of your own

An experiment is a file, such as those in benchmarks/training/experiments. Each run is a separate process,
`starpod train`, as a user would start it, and the same command continues an experiment that was stopped. Nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from benchmarks.machine import origin
from benchmarks.results import RESULTS, print_table
from benchmarks.training.comparison import EVALUATION, SPENT, STEPS, compare_runs, spent_by
from benchmarks.training.pictures import draw_charts
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.section import ConfigError, Section
from starpod.trainer.configuration.yaml12 import YamlError, load_yaml
from starpod.trainer.diagnostics.echo_trap import SIGNALS, Signal
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import is_graded, return_with_interval
from starpod.trainer.rollout.environment import local_services
from starpod.v1.spelling import near, nearest

FOLDER = Path(__file__).parent
EXPERIMENTS = {path.stem: path for path in sorted((FOLDER / "experiments").glob("*.yaml"))}
"""File of each experiment, by name."""
KEYS = ("step", "success", "success_low", "success_high", "return_mean", "return_low", "return_high")
"""Figures of an evaluation that the results keep."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One curve: a configuration, and changes to it."""

    base: str
    changes: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        """The configuration and the changes, as `starpod train` takes them."""
        return [self.base, *(f"{key}={json.dumps(value)}" for key, value in self.changes.items())]

    def changed_words(self, words: Sequence[str]) -> list[str]:
        """The configuration, its changes and those of `words`, which replace changes of the same keys."""
        changed_keys = {word.partition("=")[0] for word in words}
        return [*(word for word in self.words if word.partition("=")[0] not in changed_keys), *words]

    @property
    def slug(self) -> str:
        """Name of the folders of its runs. Equal runs of several experiments share it."""
        return f"{Path(self.base).stem}-{hashlib.sha256(repr(self.words).encode()).hexdigest()[:8]}"


class Experiment(Section):
    """The content of an experiment's file."""

    title: str
    question: str = Field(description="What the experiment answers.")
    base: str = Field(description="Configuration of all variants: a name, or a file relative to the checkout.")
    machine: Literal["two cores", "one GPU"] = Field(description="one GPU: the settings of gpu.yaml apply.")
    seeds: int = Field(default=3, ge=1)
    metrics: tuple[str, ...] = Field(default=(EVALUATION,), min_length=1, description="One chart each.")
    over: Literal["iterations", "resources"] = Field(
        default="iterations", description="x axes of the charts; resources: environment steps, tokens and forks."
    )
    caption: str = Field(description="What the picture shows.")
    transfer: dict[str, Any] = Field(
        default={}, description="Options of the environment for a second evaluation of the final policy."
    )
    set: dict[str, Any] = Field(default={}, description="Changes in all variants, by dotted key.")
    variants: dict[str, dict[str, Any]] = Field(
        min_length=1, description="Changes by the variant's name. The key `base` replaces the configuration."
    )

    def read_variants(self) -> dict[str, Variant]:
        machine = load_yaml((FOLDER / "gpu.yaml").read_text()) if self.machine == "one GPU" else {}
        changes = {name: {"base": self.base, **machine, **self.set, **keys} for name, keys in self.variants.items()}
        return {name: Variant(str(keys.pop("base")), keys) for name, keys in changes.items()}


def read_experiment(path: Path) -> Experiment:
    """Return an experiment. Raises ConfigError if its file cannot be used."""
    try:
        return Experiment.model_validate(load_yaml(path.read_text(encoding="utf-8")))
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(map(_explain, error.errors()))}") from None


def _explain(item: Any) -> str:
    """Return one of pydantic's errors as a sentence."""
    key = ".".join(map(str, item["loc"]))
    is_unknown = item["type"] == "extra_forbidden"
    return f"{key}: " + (f"no such key{nearest(key, list(Experiment.model_fields))}" if is_unknown else item["msg"])


def read_configs(path: Path, words: Sequence[str] = ()) -> dict[str, Config]:
    """Return the configuration of each variant, changed by `words`. Raises ConfigError if one cannot be used."""
    configs = {}
    for name, variant in read_experiment(path).read_variants().items():
        base, *changes = variant.changed_words(words)
        try:
            configs[name] = load_config(base, changes)
        except ConfigError as error:
            raise ConfigError(f"{path}: variant {name!r}: {error}") from None
    return configs


def starpod(*words: str, stdout: int | None = None) -> str:
    """Run a command of starpod, and return its output if `stdout` is a pipe.

    If it fails, it has printed why, and this process exits with the same status.
    """
    # A command in a job, such as that of an agent, means this interpreter by `python`.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    process = subprocess.run(
        [sys.executable, "-m", "starpod.cli.main", *words], stdout=stdout, text=True, env={**os.environ, "PATH": path}
    )
    if process.returncode:
        raise SystemExit(process.returncode)
    return process.stdout


def run(name: str, variant: Variant, seed: int, folder: Path, words: Sequence[str]) -> dict[str, object]:
    """Train once and return the figures. An unfinished run of this configuration is resumed, a finished one kept.

    Args:
        name: name of the variant, as it is reported.
        variant: recipe and changes of its configuration.
        seed: seed of the run.
        folder: folder of the run. It is emptied if it has a run of another configuration.
        words: further arguments of `starpod train`, which apply to all variants.
    """
    command = ["train", *variant.changed_words(words), f"seed={seed}", "monitor.screen=plain"]
    settings = starpod(*command, "--dry-run", stdout=subprocess.PIPE)
    settings_file, source = folder / "asked.yaml", folder / "origin.json"
    if not settings_file.exists() or settings_file.read_text() != settings:
        shutil.rmtree(folder, ignore_errors=True)
    if RunFolder(folder).read_final() is None:  # a stopped run has a report, too
        folder.mkdir(parents=True, exist_ok=True)
        settings_file.write_text(settings)
        if not source.exists():  # otherwise the run was started there before, and is resumed
            source.write_text(json.dumps(origin()))
        starpod(*command, "--run-dir", str(folder), "--resume-or-start")
    if (final := RunFolder(folder).read_final()) is None:
        raise SystemExit(f"{folder} has no final evaluation: the run was stopped; give the command again")
    evaluations = RunFolder(folder).read_evaluations()
    first = evaluations[0]
    steps, scales = RunFolder(folder).read_metrics(), {axis: spent_by(RunFolder(folder), axis) for axis in SPENT}
    return {
        "variant": name,
        "seed": seed,
        "origin": json.loads(source.read_text()) if source.exists() else {},
        "seconds": RunFolder(folder).read_facts()["ended"]["seconds"],  # including the parts before an interruption
        "before": {key: first[key] for key in KEYS},
        "after": {key: final[key] for key in KEYS},
        "environments": {
            name: {
                "before": result,
                "after": {key: value for key, value in final["environments"][name].items() if key in result},
            }
            for name, result in first.get("environments", {}).items()
        },
        "last": evaluations[-1]["success"],
        "curve": [
            {"success": line["success"], "return_mean": line["return_mean"]}
            | {axis: round(at_step(line["step"])) for axis, at_step in scales.items()}
            for line in evaluations
        ],
        "greedy": (final.get("greedy") or {}).get("success"),
        "best_of": (final.get("best_of") or {}).get("success"),
        "reference": first.get("reference", {}),
        "factors": _factors(steps),
        "signals": {signal.name: means for signal in SIGNALS if (means := _signal(signal, steps))},
        "warnings": [
            {"step": step["step"], "text": text.partition(". To do")[0]}
            for step in steps
            for text in step.get("warnings", ())
        ],
    }


def _factors(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean factors (predicted and measured, by agent) by which one scale changes squared gradients."""
    factors: dict[str, list[float]] = {}
    for name, value in (item for step in steps for item in step["metrics"].items()):
        if name.startswith("gradients/agents/") and name.endswith("_factor"):
            factors.setdefault(name.removeprefix("gradients/agents/"), []).append(value)
    return {name: statistics.fmean(values) for name, values in factors.items()}


def transfer(folder: Path, options: Mapping[str, Any]) -> dict[str, object]:
    """Evaluate a finished run's policy on its environment with other options, and return the figures."""
    config, report = load_config(str(RunFolder(folder).config)), folder / "transfer.json"
    environment = config.environment.id
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    words = [word for name, value in values.items() for word in ("--option", f"{name}={value}")]
    words += ["--episodes", str(config.evaluation.episodes), "--temperature", str(config.evaluation.temperature)]
    with local_services([environment]) as address:
        starpod("eval", str(folder), "-e", f"{address}/{environment}", *words, "--json", str(report))
    result = json.loads(report.read_text())["models"][str(folder)]["environments"][environment]
    return {key: result[key] for key in KEYS[1:]}


def _signal(signal: Signal, steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a signal of the Echo Trap: mean of the first ten steps, and worst and last of the medians over five steps.

    The result is empty if no step has the signal.
    """
    values = [step["metrics"][signal.metric] for step in steps if step["metrics"].get(signal.metric) is not None]
    if not values:
        return {}
    medians = [statistics.median(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]
    worst = max(medians) if signal.rises else min(medians)
    return {"start": statistics.fmean(values[:10]), "worst": worst, "end": medians[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="NAME", help="a name or a YAML file; none: list all")
    parser.add_argument("--seeds", type=_positive, help="instead of the number in the file")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="changed in every run, whatever the file says"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the files, and print the runs' commands")
    arguments = parser.parse_args()
    try:
        paths = [find_experiment(name) for name in arguments.experiments]
        if arguments.dry_run:
            for path in paths or EXPERIMENTS.values():
                print_commands(path, arguments.seeds, arguments.set)
        elif paths:
            if find_spec("matplotlib") is None:
                raise ConfigError("the picture needs matplotlib: pip install '.[bench]'")
            for path in paths:
                run_experiment(path, arguments)
        else:
            print_experiments()
    except ConfigError as error:
        parser.error(str(error))


def find_experiment(name: str) -> Path:
    """Return the file of an experiment, given its name or its file. Raises ConfigError if there is none."""
    path = EXPERIMENTS.get(name, Path(name))
    if not path.is_file():
        close = near(name, EXPERIMENTS)
        advice = f"; did you mean {' or '.join(close)}?" if close else ": give a name of the list, or a YAML file"
        raise ConfigError(f"no experiment {name!r}{advice}")
    return path


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of seeds, which is 1 or more")
    return number


def print_experiments() -> None:
    experiments = {name: read_experiment(path) for name, path in EXPERIMENTS.items()}
    rows = [[name, each.question, each.machine, str(each.seeds)] for name, each in experiments.items()]
    print_table(["Experiment", "Question", "Machine", "Seeds"], rows)


def print_commands(path: Path, seeds: int | None, words: Sequence[str]) -> None:
    """Print the command of each variant, and the sum of the runs' limits of minutes if each run has one."""
    experiment, configs = read_experiment(path), read_configs(path, words)
    seeds = seeds or experiment.seeds
    limits = [config.stop.minutes for config in configs.values()]
    note = "" if None in limits else f", at most {seeds * sum(filter(None, limits)):g} minutes of training"
    print(f"# {path.stem}: {len(configs)} variants x {seeds} seeds on {experiment.machine}{note}")
    for variant, settings in experiment.read_variants().items():
        print(f"# {variant}\nstarpod train {shlex.join(settings.changed_words(words))}")


def run_experiment(path: Path, arguments: argparse.Namespace) -> None:
    """Do the runs of an experiment that are missing, and write its results and its picture."""
    experiment, results, folders, name = read_experiment(path), [], {}, path.stem
    read_configs(path, arguments.set)  # a mistake in the last variant is found before the first one has run
    for label, variant in experiment.read_variants().items():
        for seed in range(1, (arguments.seeds or experiment.seeds) + 1):
            folder = arguments.runs / f"{variant.slug}-{seed}"
            results.append(run(label, variant, seed, folder, arguments.set))
            if experiment.transfer:
                results[-1]["transfer"] = transfer(folder, experiment.transfer)
            folders.setdefault(label, []).append(folder)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"learning_{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    over = tuple(SPENT) if experiment.over == "resources" else (STEPS,)
    draw_charts(arguments.out / f"learning_{name}.svg", compare_runs(folders, experiment.metrics, over))
    head = ["Variant", "Seed", "Before", "Final", "Last", "Seconds", "Deviation", "Warned at"]
    print_table(head, _rows(results), name)


def _rows(results: list[dict[str, Any]]) -> list[list[str]]:
    rows = [
        [
            result["variant"],
            str(result["seed"]),
            _interval(result["before"]),
            _interval(result["after"]),
            f"{result['last']:.1%}",
            f"{result['seconds']:.0f}",
            f"{deviation['end']:.3f}" if (deviation := result["signals"].get("reward_std")) else "-",
            ", ".join(str(warning["step"]) for warning in result["warnings"]) or "-",
        ]
        for result in results
    ]
    for variant in dict.fromkeys(result["variant"] for result in results):
        ends = [result["after"]["success"] for result in results if result["variant"] == variant]
        if len(ends) > 1:
            spread = f"{statistics.fmean(ends):.1%} ± {statistics.stdev(ends):.1%}"
            rows.append([variant, "mean", "", spread])
    for result in results:
        for name, value in result["factors"].items():
            rows.append([f"{result['variant']}: {name}", str(result["seed"]), "", f"{value:.2f}"])
    for policy, summary in results[0]["reference"].items():
        rows.append([f"reference: {policy}", "", "", _interval(summary)])
    return rows


def _interval(summary: object) -> str:
    assert isinstance(summary, dict)
    text = f"{summary['success']:.1%} ({summary['success_low']:.1%} to {summary['success_high']:.1%})"
    return f"{text}, return {return_with_interval(summary)}" if is_graded(summary) else text


if __name__ == "__main__":
    main()
