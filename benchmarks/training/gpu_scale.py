"""Distance of a training run from the limits of one GPU, with random weights in the shapes of SmolLM2 and Qwen2.5.

    python -m benchmarks.training.gpu_scale [--shape 135M 0.5B 1.5B 3B] [--iterations 4] [--trl PYTHON] [--json FILE]

For each shape, a run of GRPO on Sokoban (8 groups of 16, 5 turns, replies of 64 tokens, nothing filtered) samples with
vLLM and updates, all in bfloat16 on one GPU. It measures
- opening the run, and whole iterations;
- sampling inside the run, beside the run's engine and vLLM's offline `LLM.generate`, which sample as many tokens after
  the same prompts, turn by turn;
- the update's arithmetic as 6 x parameters x context tokens per second (6ND), as a share of `--peak`, and its memory;
- vLLM's `LLM.generate` on the requests of `gpu_check`, whose generation it bounds;
- an iteration on the bandit beside TRL's GRPOTrainer with vLLM in its process (`--trl`: a Python that has both).

Without a GPU the default is a tiny shape on the CPU. Rows that need vLLM or TRL say so if these are not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.machine import origin, peak_bytes
from benchmarks.results import print_table
from benchmarks.training import beside_trl, gpu_check
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import episodes_of
from starpod.trainer.engines.base import Engine, Request
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.tiny import build_tiny, train_tokenizer

WITHOUT_VLLM = "not measured: vllm is not installed"
ROOT = Path(__file__).resolve().parents[2]
WIDTHS = ("hidden", "intermediate", "layers", "heads", "key_value_heads", "vocabulary")
SHAPES = {
    "tiny": (64, 192, 2, 2, 1, 640),
    "135M": (576, 1536, 30, 9, 3, 49_152),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "3B": (2048, 11008, 36, 16, 2, 151_936),
}
"""Widths of each shape, in the order of WIDTHS, with tied embeddings: SmolLM2-135M and three sizes of Qwen2.5."""
DATASHEET = 990.0
"""Dense bfloat16 TFLOP/s of an H100 or H200, by its datasheet."""

CONFIG = """
model: {name: MODEL, dtype: DTYPE}
environment: {id: sokoban-v1, max_turns: 5}
engine: {name: ENGINE, slots: 128, gpu_memory_fraction: 0.3}
sampling: {max_reply_tokens: REPLY, max_episode_tokens: 2048}
collect: {groups: GROUPS, group_size: SIZE}
algorithm: {preset: starpo-grpo, kl: {where: "off"}, entropy_coefficient: 0.0}
optimizer: {lr: 1.0e-6, micro_batch_tokens: 16384}
evaluation: {every: 0, episodes: 1, reference: []}
stop: {iterations: ITERATIONS}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. value: None if it was not measured, and `unit` then says why."""

    shape: str
    what: str
    value: float | None
    unit: str = ""


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=[*SHAPES][1:] if gpu else ["tiny"])
    parser.add_argument("--iterations", type=int, default=4, help="of each run; the first one warms caches up")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--reply", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--peak", type=float, help=f"TFLOP/s; default {DATASHEET:g} on a GPU, a product's on a CPU")
    parser.add_argument("--trl", default=str(ROOT / ".venv-adapters" / "bin" / "python"), help="Python that has TRL")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offline:
        print(json.dumps(sample_offline(**json.loads(arguments.offline.read_text()))))
        return
    peak = arguments.peak or (DATASHEET if gpu else product_tflops())
    rows: list[Row] = []
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary)
            parameters = make_model(shape, work / "model")
            rows += asyncio.run(measure_run(shape, work, parameters, peak, arguments))
            rows += beside_others(shape, work, arguments)
    print_rows(rows, peak)
    if arguments.json is not None:
        content = origin()
        content["machine"]["gpu"] = torch.cuda.get_device_name() if gpu else None
        content |= {"peak_tflops": peak, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def make_model(shape: str, folder: Path) -> int:
    """Write a model with random weights, and a tokenizer of as many words as it has entries. Returns its parameters."""
    widths = dict(zip(WIDTHS, SHAPES[shape], strict=True))
    config = ModelConfig.model_validate({"tiny": {**widths, "tied": True}})
    rng = random.Random(0)
    words = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(2 * widths["vocabulary"]))
    tokenizer = train_tokenizer([words], size=widths["vocabulary"])
    model = build_tiny(config, tokenizer, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def product_tflops(size: int = 1024) -> float:
    """Return the TFLOP/s of the fastest of some products of square float32 matrices."""
    matrix = torch.randn(size, size)
    return max(2 * size**3 / timed(lambda: matrix @ matrix) for _ in range(5)) / 1e12


def timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


# --- our run ----------------------------------------------------------------------------------------------------------


async def measure_run(shape: str, work: Path, parameters: int, peak: float, arguments: argparse.Namespace) -> list[Row]:
    """Measure a run: its opening, iterations, sampling and update."""
    gpu = torch.cuda.is_available()
    values = {
        "DTYPE": "bfloat16" if gpu else "float32",
        "ENGINE": engine_name(),
        "REPLY": arguments.reply,
        "GROUPS": arguments.groups,
        "SIZE": arguments.group_size,
        "ITERATIONS": arguments.iterations,
        "MODEL": work / "model",
    }
    config = work / "run.yaml"
    config.write_text(beside_trl.fill_in(CONFIG, values))
    steps: list[dict[str, float]] = []
    memory = 0
    start = perf_counter()
    async with beside_trl.opened(config, work / "run") as run:
        opening = perf_counter() - start
        for _ in range(arguments.iterations):
            run.begin_step()
            await run.sync()
            groups = await run.collect()
            if gpu:
                torch.cuda.reset_peak_memory_stats()
            await run.learn(run.filter(groups))
            memory = torch.cuda.max_memory_allocated() if gpu else peak_bytes()
            run.finish_step()
            episodes = episodes_of(groups)
            contexts = sum(len(sample.tokens) for row in Batch(episodes).samples for sample in row)
            token_count = sum(episode.sampled_tokens for episode in episodes)
            steps.append({**run.report.metrics, "contexts": contexts, "sampled": token_count})
        rounds = rounds_of(episodes)
        alone_seconds = await sample_alone(run.collecting.collector.agents.engine, rounds)
    last = steps[1:] or steps
    rate = statistics.median(step["sampled"] / step["time/collect"] for step in last)
    arithmetic = 6 * parameters * statistics.median(step["contexts"] / step["time/update"] for step in last) / 1e12
    rows = [
        Row(shape, f"opening the run, engine {engine_name()}", opening, "s"),
        Row(shape, "iteration", statistics.median(step["time/step"] for step in last), "s"),
        Row(shape, "sampling inside the run", rate, "tokens/s"),
        Row(shape, "sampling, share of the engine alone", rate * alone_seconds / token_count, ""),
        Row(shape, "update, 6ND", arithmetic, "TFLOP/s"),
        Row(shape, "update, 6ND as a share of the peak", arithmetic / peak, ""),
        Row(shape, "memory of the update" if gpu else "memory of the process", memory / 2**30, "GiB"),
    ]
    label = "sampling, share of vLLM's LLM.generate"
    if engine_name() == "vllm":
        rows.append(Row(shape, label, rate * in_vllm(work, rounds) / token_count, ""))
    else:
        rows.append(Row(shape, label, None, WITHOUT_VLLM))
    return rows


def engine_name() -> str:
    return "vllm" if torch.cuda.is_available() and importlib.util.find_spec("vllm") else "torch"


def rounds_of(episodes: Sequence[Episode]) -> list[list[tuple[list[int], int]]]:
    """Return, turn by turn, the whole context before each reply, and the number of the reply's tokens."""
    rounds: list[list[tuple[list[int], int]]] = []
    for episode in episodes:
        context: list[int] = []
        for index, turn in enumerate(episode.turns):
            context = [*([] if turn.fresh else context), *turn.prompt]
            if index == len(rounds):
                rounds.append([])
            rounds[index].append((context, len(turn.reply)))
            context = [*context, *turn.reply]
    return rounds


async def sample_alone(engine: Engine, rounds: Sequence[Sequence[tuple[list[int], int]]]) -> float:
    """Return the seconds in which the engine samples as many tokens after the same contexts, round by round."""
    start = perf_counter()
    for calls in rounds:
        requests = [
            Request(context, count, frozenset(), seed=index, conversation=f"alone {index}")
            for index, (context, count) in enumerate(calls)
        ]
        await asyncio.gather(*map(engine.generate, requests))
    return perf_counter() - start


# --- vLLM alone -------------------------------------------------------------------------------------------------------


def in_vllm(work: Path, rounds: Sequence[Sequence[tuple[list[int], int]]]) -> float:
    """Return the seconds that `sample_offline` needs in a process of its own, whose memory is free afterwards."""
    request_file = work / "offline.json"
    request_file.write_text(json.dumps({"model": str(work / "model"), "rounds": rounds}))
    command = [sys.executable, "-m", "benchmarks.training.gpu_scale", "--offline", str(request_file)]
    process = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(process.stdout.splitlines()[-1])


def sample_offline(model: str, rounds: Sequence[Sequence[tuple[list[int], int]]]) -> float:
    """Return the seconds in which vLLM's `LLM.generate` samples the rounds, after a warm-up on the first one."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.5, enable_prefix_caching=True)

    def sample(calls: Sequence[tuple[list[int], int]]) -> None:
        settings = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0) for _, count in calls]
        engine.generate([{"prompt_token_ids": context} for context, _ in calls], settings, use_tqdm=False)

    sample(rounds[0])
    engine.reset_prefix_cache()
    return sum(timed(lambda calls=calls: sample(calls)) for calls in rounds)


# --- beside others ----------------------------------------------------------------------------------------------------


def beside_others(shape: str, work: Path, arguments: argparse.Namespace) -> list[Row]:
    """Measure `gpu_check`'s requests in vLLM alone, and an iteration on the bandit beside TRL's."""
    rows = []
    label = "gpu-check's requests in vLLM's LLM.generate"
    if engine_name() == "vllm":
        requests = gpu_check.make_requests(argparse.Namespace(requests=256, tokens=128), SHAPES[shape][-1], 1)
        calls = [(list(request.prompt), request.max_tokens) for request in requests]
        rows.append(Row(shape, label, 256 * 128 / in_vllm(work, [calls]), "tokens/s"))
    else:
        rows.append(Row(shape, label, None, WITHOUT_VLLM))
    label = "iteration on the bandit, share of TRL's"
    if not has_trl(arguments.trl):
        return [*rows, Row(shape, label, None, f"not measured: {arguments.trl} has no TRL")]
    episodes = 2 * arguments.groups * arguments.group_size
    sizes = {"rows": 32, "engine": "vllm", "micro_batch_tokens": 16384} if engine_name() == "vllm" else {"rows": 2}
    size = beside_trl.Size(arguments.groups, episodes // arguments.groups, **sizes)
    peer = beside_trl.train_trl(arguments.trl, work / "model", arguments.iterations, work, size, evaluated=False)
    ours = beside_trl.train(sys.executable, (), work / "model", arguments.iterations, work / "ours", size)
    pair = [statistics.median(result["seconds"][1:] or result["seconds"]) for result in (ours, peer)]
    return [
        *rows,
        Row(shape, "iteration on the bandit", pair[0], "s"),
        Row(shape, "iteration on the bandit, TRL", pair[1], "s"),
        Row(shape, label, pair[0] / pair[1], ""),
    ]


@functools.cache
def has_trl(python: str) -> bool:
    """Return whether this Python can import TRL."""
    try:
        return subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0
    except OSError:
        return False


def print_rows(rows: Sequence[Row], peak: float) -> None:
    cells = []
    for row in rows:
        value = "" if row.value is None else f"{row.value:,.3g}" if row.value < 1000 else f"{row.value:,.0f}"
        cells.append([row.shape, row.what, value, row.unit])
    print_table(["Shape", "Row", "Value", "Unit"], cells, f"peak: {peak:,.3g} TFLOP/s")


if __name__ == "__main__":
    main()
