"""Check that vLLM and the trainer agree on a machine with a GPU, and measure the speed of both.

    python -m benchmarks.training.gpu_check [--dtype bfloat16] [--json FILE]

It builds a small Qwen2-like decoder with random weights. Then it
- samples the same requests from the torch engine and from vLLM, and scores the replies with the trainer: the
  log-probabilities of sampler and trainer must agree;
- changes the weights, transfers them, and compares again: the new weights must be in use;
- interrupts replies by a pause, and continues them with new weights: each token's version must be right;
- measures generation and an update pass.

Exit status: 0 if all agree, 1 if not, 2 if there is no GPU or no vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.machine import origin
from benchmarks.results import print_table
from starpod.trainer.engines.base import Engine, EngineError, Reply, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy

ROOT = Path(__file__).resolve().parents[2]
MAX_CONTEXT = 1024
AGREE = {"float32": (0.002, 0.02), "bfloat16": (0.02, 0.5)}
"""Bounds by dtype of the mean and the largest difference of log-probabilities, in nats, that rounding explains."""


@dataclass(frozen=True, slots=True)
class Check:
    """Differences in log-probability between sampler and trainer, in nats. ok: whether rounding explains them."""

    what: str
    mean: float
    largest: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Speed:
    what: str
    tokens_per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(AGREE), default="bfloat16")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of a reply")
    parser.add_argument("--handover", choices=("auto", "ipc", "disk"), nargs="+", default=["ipc", "disk"])
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "gpu_check.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check needs a GPU, and torch sees none on this machine", file=sys.stderr)
        sys.exit(2)
    policy = make_policy(arguments).to("cuda")
    checks: list[Check] = []
    speeds: list[Speed] = []
    try:
        for name, handover in (("torch", "auto"), *(("vllm", way) for way in arguments.handover)):
            config = EngineConfig.model_validate(
                {"name": name, "slots": arguments.requests, "dtype": arguments.dtype, "handover": handover}
            )
            label = name if name == "torch" else f"{name}, {handover}"
            new_checks, rates = asyncio.run(check_engine(label, config, policy, arguments))
            checks += new_checks
            speeds += rates
    except EngineError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        sys.exit(2)
    speeds.append(Speed("update pass (context tokens)", measure_update(policy, arguments)))
    print_tables(checks, speeds)
    content = origin()
    content["machine"]["gpu"] = torch.cuda.get_device_name()
    content["machine"]["versions"] |= {name: version(name) for name in ("torch", "vllm")}
    content |= {"checks": [asdict(check) for check in checks], "speeds": [asdict(speed) for speed in speeds]}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def make_policy(arguments: argparse.Namespace) -> Policy:
    """Build the policy. Its heads are 64 wide, because attention kernels require it."""
    shape = {
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "heads": arguments.hidden // 64,
        "intermediate": 3 * arguments.hidden,
        "positions": MAX_CONTEXT,
    }
    config = ModelConfig.model_validate({"name": "tiny", "tiny": shape, "dtype": arguments.dtype})
    return build_policy(config, texts=["Left Down Right Up"], critic="none", seed=1)


def make_requests(arguments: argparse.Namespace, vocabulary: int, seed: int) -> list[Request]:
    """Return requests of 20 to 200 random prompt tokens each.

    Args:
        arguments: provides `requests`, their number, and `tokens`, the maximum length of a reply.
        vocabulary: number of token ids to draw from.
        seed: seed of the draws.
    """
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(vocabulary) for _ in range(rng.randint(20, 200))],
            arguments.tokens,
            frozenset(),
            seed=rng.randrange(2**31),
        )
        for _ in range(arguments.requests)
    ]


async def check_engine(
    label: str, config: EngineConfig, policy: Policy, arguments: argparse.Namespace
) -> tuple[list[Check], list[Speed]]:
    """Check agreement before, after and across a transfer of weights, and measure its time and tokens per second."""
    mean_bound, bound = AGREE[arguments.dtype]
    checks: list[Check] = []

    def check_gaps(what: str, requests: Sequence[Request], replies: Sequence[Reply], keep: int | None = None) -> None:
        """Add a check of these replies. keep: compare only tokens of this version; None: all."""
        gaps = gaps_of(policy, requests, replies, keep)
        mean, max_gap = statistics.fmean(gaps), max(gaps)
        checks.append(Check(f"{label}: {what}", mean, max_gap, mean <= mean_bound and max_gap <= bound))

    engine = build_engine(config, policy, max_context=MAX_CONTEXT)
    try:
        requests = make_requests(arguments, policy.vocabulary, 1)
        replies = await sample(engine, requests)
        check_gaps("first weights", requests, replies)
        start = perf_counter()
        new_replies = await sample(engine, requests)
        generating = perf_counter() - start
        rate = sum(len(reply.tokens) for reply in new_replies) / generating

        change(policy, 1)
        stale_gap = statistics.fmean(gaps_of(policy, requests, replies))
        seconds = await hand_over(engine, policy, 1)
        replies = await sample(engine, requests)
        check_gaps("weights handed over", requests, replies)
        # Otherwise this check could not distinguish old weights from new ones.
        checks.append(Check(f"{label}: the change of weights shows", stale_gap, stale_gap, stale_gap > 2 * mean_bound))

        calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await asyncio.sleep(generating / 4)
        await engine.pause()
        change(policy, 2)
        await engine.load(2, policy.model)
        await engine.resume()
        replies = await asyncio.gather(*calls)
        if any(len(set(reply.versions)) > 1 for reply in replies):
            check_gaps("the new part of replies that a pause cut", requests, replies, keep=2)
    finally:
        await engine.close()
    speeds = [Speed(f"{label}: generation (sampled tokens)", rate)]
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    speeds.append(Speed(f"{label}: hand-over (parameters)", weights / seconds))
    return checks, speeds


async def sample(engine: Engine, requests: Sequence[Request]) -> list[Reply]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def hand_over(engine: Engine, policy: Policy, version: int) -> float:
    start = perf_counter()
    await engine.pause()
    await engine.load(version, policy.model)
    await engine.resume()
    return perf_counter() - start


def change(policy: Policy, seed: int) -> None:
    """Change all weights, by more than an update would."""
    draws = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=draws, device=policy.device, dtype=torch.float32)
            parameter.add_((0.3 * parameter.float().std().nan_to_num(0.02) * noise).to(parameter.dtype))


@torch.no_grad()
def gaps_of(
    policy: Policy, requests: Sequence[Request], replies: Sequence[Reply], keep: int | None = None
) -> list[float]:
    """Return |sampler - trainer| of each sampled token's log-probability, under the policy's current weights."""
    gaps: list[float] = []
    for start in range(0, len(requests), 32):
        rows = list(zip(requests[start : start + 32], replies[start : start + 32], strict=True))
        batch = pack(rows, policy.device)
        logprobs = policy.score(*batch).logprobs_N.tolist()
        engine_logprobs = [value for _, reply in rows for value in reply.logprobs]
        versions = [version for _, reply in rows for version in reply.versions]
        gaps += [
            abs(logprob - engine_logprob)
            for logprob, engine_logprob, version in zip(logprobs, engine_logprobs, versions, strict=True)
            if keep is None or version == keep
        ]
    return gaps


def pack(
    rows: Sequence[tuple[Request, Reply]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of `Policy.score`: padded ids, lengths, and the mask of sampled tokens."""
    tokens = [[*request.prompt, *reply.tokens] for request, reply in rows]
    width = max(map(len, tokens))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=device)
    sampled = torch.zeros_like(ids, dtype=torch.bool)
    for index, (request, reply) in enumerate(rows):
        sampled[index, len(request.prompt) : len(request.prompt) + len(reply.tokens)] = True
    return ids, torch.tensor(list(map(len, tokens)), device=device), sampled


def measure_update(policy: Policy, arguments: argparse.Namespace, rounds: int = 5) -> float:
    """Return the context tokens per second of scoring with gradients, as a median over the rounds."""
    requests = make_requests(arguments, policy.vocabulary, 2)
    replies = [Reply(request.prompt[:16], [0.0] * 16, [0] * 16, "length") for request in requests]
    total = sum(len(request.prompt) + 16 for request in requests)
    rates = []
    for _ in range(rounds + 1):
        policy.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = perf_counter()
        for offset in range(0, len(requests), 64):
            rows = list(zip(requests[offset : offset + 64], replies[offset : offset + 64], strict=True))
            batch = pack(rows, policy.device)
            policy.score(*batch).logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        rates.append(total / (perf_counter() - start))
    return statistics.median(rates[1:])


def print_tables(checks: Sequence[Check], speeds: Sequence[Speed]) -> None:
    rows = [
        [check.what, f"{check.mean:.5f}", f"{check.largest:.4f}", "agrees" if check.ok else "DIFFERS"]
        for check in checks
    ]
    print_table(["Sampler against trainer, in nats", "Mean", "Largest", ""], rows)
    print_table(["Speed", "Per second"], [[speed.what, f"{speed.tokens_per_second:,.0f}"] for speed in speeds])


if __name__ == "__main__":
    main()
