"""Iterations with a pretrained model on a CPU: `starpod train`, the same at an older commit, and TRL's GRPOTrainer.

    make .venv/.smollm .venv-adapters/.ready
    .venv/bin/python -m benchmarks.training.beside_trl [--iterations 6] [--way trl now before --before PYTHON]

All start from the same warm-started SmolLM2 and play the bandit on our servers. The following are equal: 8 groups of 8,
start states, prompts, one optimiser step on every episode, replies of up to 32 tokens, advantages of Dr. GRPO, clip 0.2
and 0.28, no KL term, AdamW, float32 weights, and products in bfloat16 if the processor supports it. These differ: ours
computes shared parts of prompts once, adds an entropy bonus of 0.001 and compares sampler and trainer; TRL plays via
`rollout_func`. Ours trains for as long as TRL took, including its evaluations. Both are evaluated by our code on the
same held-out start states. Then collections take turns with the engine alone, which samples as many tokens after the
same prompts. Ways that are not measured keep their figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import child_process, origin
from benchmarks.training.experiment import starpod
from benchmarks.training.pictures import draw_charts
from starpod.client import SyncFleet
from starpod.report.curves import Chart, ChartLine
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.seeds import SeedCursor, SeedsConfig
from starpod.trainer.data.group import episodes_of
from starpod.trainer.engines.base import Request
from starpod.trainer.models.config import SMOLLM2, model_title
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.prompts.prompt import Prompter
from starpod.trainer.rollout.environment import local_services
from starpod.trainer.run.interrupts import Interrupts
from starpod.trainer.run.run import Run
from starpod.trainer.run.setup import open_run

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "benchmarks" / "llm.json"
PICTURE = RESULT.with_name("llm-success.svg")
THREADS, REPLY, LR, SEED = 2, 32, 2e-5, 1


@dataclass(frozen=True, slots=True)
class Size:
    """Size of an iteration, and the engine of both trainers: `torch` means transformers' `generate` in TRL."""

    groups: int = 8
    group_size: int = 8
    rows: int = 8
    """Number of episodes in a batch of TRL."""
    engine: str = "torch"
    micro_batch_tokens: int = 1024


SIZE = Size()
EPISODES = 128
"""Number of held-out start states of an evaluation."""
EVALUATED = ("step", "success", "success_low", "success_high")
"""Figures of an evaluation that the result file keeps."""
FOR_EVER = 10_000
"""Number of iterations of a run that ends by its time limit."""
EVERY = 10
"""Number of our iterations between two evaluations."""
ALONE = 8
"""Number of collections whose replies the engine samples again."""

CONFIG = f"""
model: {{name: MODEL, dtype: auto}}
prompt: {{context: single_turn}}
threads: {THREADS}
seed: {SEED}
environment: {{id: bandit-v1}}
sampling: {{max_reply_tokens: {REPLY}, max_episode_tokens: 320}}
engine: {{name: ENGINE, slots: SLOTS}}
collect: {{groups: GROUPS, group_size: GROUP_SIZE}}
algorithm: {{preset: starpo-s, advantage: dr_grpo, filter: {{strategy: none}}}}
optimizer: {{lr: {LR}, micro_batch_tokens: BUDGET}}
evaluation: {{every: 0, episodes: {EPISODES}, temperature: 0.5, reference: []}}
stop: {{iterations: ITERATIONS}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", nargs="+", choices=("trl", "now", "before"), default=("trl", "now"))
    parser.add_argument("--iterations", type=int, default=6, help="of TRL and of the older commit")
    parser.add_argument("--model", type=Path, help="a warm-started model; else one is made first")
    parser.add_argument("--trl", default=str(ROOT / ".venv-adapters" / "bin" / "python"), help="Python that has TRL")
    parser.add_argument("--before", metavar="PYTHON", help="way before: Python of an older checkout")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="way before: keys of its own")
    arguments = parser.parse_args()
    results = json.loads(RESULT.read_text())["results"] if RESULT.exists() else {}
    if "now" in arguments.way and "trl" not in arguments.way and "TRL" not in results:
        parser.error(f"way now trains for as long as TRL took, which {RESULT} does not have: give --way trl now")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model, iterations = arguments.model or warm_started(work), arguments.iterations
        if "trl" in arguments.way:
            results["TRL"] = train_trl(arguments.trl, model, iterations, work)
        if "now" in arguments.way:
            minutes = sum(results["TRL"]["seconds"]) / 60
            settings = ["algorithm.mini_batch_size=64", f"stop.minutes={minutes}", f"evaluation.every={EVERY}"]
            results["starpod"] = train(sys.executable, settings, model, FOR_EVER, work / "now")
            results["starpod"]["evaluations"] = evaluations(work / "now")
            results["starpod"] |= asyncio.run(sample_inside_and_alone(model, work / "inside"))
        if "before" in arguments.way:
            results["starpod, before"] = train(arguments.before, arguments.set, model, iterations, work / "before")
    content = {**origin(), "model": model_title(SMOLLM2), "threads": THREADS, "results": results}
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    if {"starpod", "TRL"} <= results.keys():
        draw_charts(PICTURE, [success_chart(results)])
    print(json.dumps(results, indent=2))


def warm_started(work: Path) -> Path:
    """Return the model of `make train-llm` before its first update."""
    run, model_folder = work / "start", work / "model"
    words = ["stop.iterations=0", "evaluation.episodes=1", "monitor.screen=plain"]
    starpod("train", "bandit_llm", f"seed={SEED}", *words, "--run-dir", str(run))
    starpod("export", str(run), str(model_folder))
    shutil.rmtree(run)
    return model_folder


def peak_gib(command: Sequence[str]) -> float:
    """Run a command. Returns the largest resident set of it and its children, in GiB."""
    with child_process(command, cwd=ROOT) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status  # otherwise Popen would wait for it, too
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss / 2**20


def configured(model: Path, iterations: int, folder: Path, size: Size = SIZE) -> Path:
    """Write the configuration to a file beside the folder of its run."""
    config = folder.with_suffix(".yaml")
    values = {
        "GROUP_SIZE": size.group_size,
        "GROUPS": size.groups,
        "SLOTS": size.groups * size.group_size,
        "ENGINE": size.engine,
        "BUDGET": size.micro_batch_tokens,
        "ITERATIONS": iterations,
        "MODEL": model,
    }
    config.write_text(fill_in(CONFIG, values))
    return config


def fill_in(template: str, values: Mapping[str, object]) -> str:
    """Return the template with each name replaced by its value, in this order."""
    for name, value in values.items():
        template = template.replace(name, str(value))
    return template


def train(
    python: str, changes: Sequence[str], model: Path, iterations: int, folder: Path, size: Size = SIZE
) -> dict[str, Any]:
    """Measure complete iterations of `starpod train`, with its own clock.

    Args:
        python: interpreter that has Starpod.
        changes: changes of the configuration, such as `seed=2`.
        model: folder of the model.
        iterations: number of iterations.
        folder: folder of the run, which is created.
        size: size of an iteration, and the engine.

    Returns:
        Seconds, sampling seconds, sampled tokens and success rate of each iteration, and the peak memory in GiB.
    """
    config = configured(model, iterations, folder, size)
    command = [python, "-m", "starpod.cli.main", "train", str(config), *changes, "monitor.screen=plain"]
    peak = peak_gib([*command, "--run-dir", str(folder)])
    steps = [step["metrics"] for step in RunFolder(folder).read_metrics()]
    return {
        "seconds": [step["time/step"] for step in steps],
        "sampling": [step["time/collect"] for step in steps],
        "sampled": [step["collect/tokens_per_turn"] * size.groups * size.group_size for step in steps],
        "success": [step["collect/success"] for step in steps],
        "peak_gib": peak,
    }


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, in the form of the result file."""
    return [{key: evaluation[key] for key in EVALUATED} for evaluation in RunFolder(folder).read_evaluations()]


async def evaluate(model: Path, folder: Path) -> dict[str, Any]:
    """Evaluate a model in the same way as a run does before its first update."""
    torch.set_num_threads(THREADS)
    async with opened(configured(model, 0, folder), folder) as run:
        await run.evaluate()
    (figures,) = evaluations(folder)
    return figures


def opened(config: Path, folder: Path) -> AbstractAsyncContextManager[Run]:
    """Open a run in this process."""
    return open_run(
        load_config(str(config)),
        folder,
        resume=False,
        parallel=Parallel(),
        screen=Screen(),
        interrupts=Interrupts(),
    )


async def sample_inside_and_alone(model: Path, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of a run's collections, and of the engine alone for the same prompts and reply lengths.

    Both take turns in one process, because the speed of the machine varies.
    """
    torch.set_num_threads(THREADS)
    config = configured(model, ALONE, folder)
    seconds: dict[str, list[float]] = {"inside": [], "alone": []}
    async with opened(config, folder) as run:
        engine = run.collecting.collector.agents.engine
        for _ in range(ALONE):
            run.begin_step()
            await run.sync()
            groups = await run.collect()
            seconds["inside"].append(run.report.metrics["time/collect"])
            requests = [
                Request(turn.prompt, len(turn.reply), frozenset(), seed=number)
                for number, turn in enumerate(turn for episode in episodes_of(groups) for turn in episode.turns)
            ]
            start = perf_counter()
            await asyncio.gather(*map(engine.generate, requests))
            seconds["alone"].append(perf_counter() - start)
    return seconds


def train_trl(
    python: str, model: Path, iterations: int, work: Path, size: Size = SIZE, *, evaluated: bool = True
) -> dict[str, Any]:
    """Measure complete iterations of TRL's trainer with a callback's clock.

    Args:
        python: interpreter that has TRL.
        model: folder of the model.
        iterations: number of iterations.
        work: folder for settings, weights and results.
        size: size of an iteration, and the engine.
        evaluated: whether to save the weights after each iteration and evaluate them.
    """
    settings, report, weights = work / "settings.json", work / "trl.json", work / "trl"
    with local_services(["bandit-v1"]) as address:
        with SyncFleet([address]) as fleet:
            (episode,) = fleet.open("bandit-v1", seed=0)
            session = episode.session
        prompt = load_config(str(configured(model, iterations, weights))).prompt
        prompter = Prompter(prompt, session.instructions, (), session.limits)
        values = {
            "model": str(model),
            "address": address,
            "threads": THREADS,
            "seed": SEED,
            "iterations": iterations,
            **asdict(size),
            "max_reply_tokens": REPLY,
            "lr": LR,
            "system": prompter.system(),
            "user": prompter.user(1, "{observation}", actions_left=session.limits.max_actions),
            "opening": prompt.opening,
            "seeds": SeedCursor(SeedsConfig().train, SEED).take(size.groups * iterations),
            "weights": str(weights) if evaluated else "",
        }
        settings.write_text(json.dumps(values))
        peak = peak_gib([python, "-m", "benchmarks.training.trl_run", str(settings), str(report)])
    evaluations = [
        asyncio.run(evaluate(weights / str(step), work / f"trl-{step}")) | {"step": step}
        for step in range(1, iterations + 1)
        if evaluated
    ]
    return json.loads(report.read_text()) | {"peak_gib": peak, "evaluations": evaluations}


def success_chart(results: Mapping[str, Mapping[str, Any]]) -> Chart:
    """Return a chart of success on the held-out start states over training time, with intervals."""
    start = results["starpod"]["evaluations"][0]
    lines = []
    for colour, name in enumerate(("starpod", "TRL")):
        minutes = [0.0, *(seconds / 60 for seconds in accumulate(results[name]["seconds"]))]
        entries = [start, *(entry for entry in results[name]["evaluations"] if entry["step"] > 0)]
        points = [(minutes[entry["step"]], entry["success"]) for entry in entries]
        band = [(minutes[entry["step"]], entry["success_low"], entry["success_high"]) for entry in entries]
        lines.append(ChartLine(name, points, colour, band=band, dots=True))
    title = f"Success on {EPISODES} held-out start states"
    return Chart(title, lines, "share", "minutes of training")


if __name__ == "__main__":
    main()
