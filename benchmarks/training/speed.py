"""Shares of training time, and speed of the two parts that compute: sampling and the update.

    python -m benchmarks.training.speed [--run runs/DIR] [--conversations 128] [--rounds 5]

Speeds: the default engine, and the trainer's scoring with gradients, are compared with plain transformers in the same
run, with the same weights and conversations. In plain transformers, `generate` has a left-padded batch, computes each
turn's whole context again and runs until the last row is done. The forward pass has right-padded rows in their original
order, and logits of all positions. Only useful tokens count: those of a reply up to its own length, and those of a
context without padding. Shares come from the metrics.jsonl of a run that was trained on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import origin
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.engines.base import Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy

ROOT = Path(__file__).resolve().parents[2]
FIRST, LATER = (30, 60), (10, 20)
"""Ranges of the number of tokens in a conversation's first prompt, and in the prompt of each later turn."""
PARTS = ("generate", "environment_wait", "update", "sync", "diagnose")
"""Parts of a step's time, as in metrics.jsonl. The remainder is `rest`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations: for each turn, the ids added to the context and the number of tokens in the reply."""

    added: list[list[list[int]]]
    replies: list[list[int]]

    @property
    def sampled(self) -> int:
        return sum(map(sum, self.replies))


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a way. tokens_per_second: median over the rounds. of: kind of tokens that count."""

    part: str
    way: str
    of: str
    tokens_per_second: float
    rounds: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run folder, for the shares")
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "training.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policy = make_policy(arguments.hidden, arguments.layers)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    results: list[Result] = []
    for name, turns, lengths in (("one turn", 1, (16, 16)), (f"{arguments.turns} turns", arguments.turns, (4, 32))):
        work = make_workload(arguments.conversations, turns, lengths, policy.vocabulary)
        results += measure_ways(
            f"generation, {name}, replies of {lengths[0]} to {lengths[1]}",
            "sampled tokens",
            work.sampled,
            {
                "transformers generate": lambda work=work: generate_plainly(policy, work),
                "starpod, torch engine": lambda work=work: asyncio.run(generate(policy, work)),
            },
            arguments.rounds,
        )
    episodes = asyncio.run(generate(policy, work))
    batch = Batch(episodes)
    results += measure_ways(
        f"update pass, {name}",
        "context tokens",
        sum(len(sample.tokens) for row in batch.samples for sample in row),
        {
            "transformers forward, backward": lambda: update_plainly(policy, episodes),
            "starpod, scoring with gradient": lambda: update(policy, batch, arguments.micro_batch_tokens),
        },
        arguments.rounds,
    )
    shares = read_shares(arguments.run / "metrics.jsonl") if arguments.run else {}
    print_tables(results, shares, parameters)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {**origin(), "parameters": parameters, "shares": shares}
    content["results"] = [asdict(result) for result in results]
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def make_policy(hidden: int, layers: int) -> Policy:
    shape = {"hidden": hidden, "layers": layers, "heads": hidden // 32, "intermediate": 3 * hidden, "positions": 1024}
    config = ModelConfig.model_validate({"name": "tiny", "tiny": shape})
    return build_policy(config, texts=["Left Down Right Up"], critic="none", seed=1)


def make_workload(conversations: int, turns: int, lengths: tuple[int, int], vocabulary: int) -> Workload:
    rng = random.Random(0)

    def ids(place: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(*(LATER if place else FIRST)))]

    return Workload(
        [[ids(index) for index in range(turns)] for _ in range(conversations)],
        [[rng.randint(*lengths) for _ in range(turns)] for _ in range(conversations)],
    )


def measure_ways(part: str, of: str, tokens: int, ways: dict[str, Callable[[], object]], rounds: int) -> list[Result]:
    """Measure all ways in turn, `rounds` times after a warm-up."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(rounds + 1):
        for way, run in ways.items():
            start = perf_counter()
            run()
            if index:
                rates[way].append(tokens / (perf_counter() - start))
    return [Result(part, way, of, statistics.median(values), values) for way, values in rates.items()]


# --- generation -------------------------------------------------------------------------------------------------------


async def generate(policy: Policy, work: Workload) -> list[Episode]:
    """Sample each conversation separately through the engine."""
    engine = TorchEngine(policy, slots=len(work.added), max_context=1024)

    async def converse(number: int) -> Episode:
        episode, context = Episode(number, 0, "none"), list[int]()
        for index, (new_ids, length) in enumerate(zip(work.added[number], work.replies[number], strict=True)):
            context += new_ids
            seed = 1000 * number + index
            reply = await engine.generate(Request(context[:], length, frozenset(), seed=seed, conversation=str(number)))
            context += reply.tokens
            turn = Turn(
                prompt=new_ids,
                fresh=not index,
                reply=reply.tokens,
                logprobs=reply.logprobs,
                versions=reply.versions,
                finish=reply.finish,
                text="",
            )
            episode.turns.append(turn)
        return episode

    try:
        return list(await asyncio.gather(*map(converse, range(len(work.added)))))
    finally:
        await engine.close()


def generate_plainly(policy: Policy, work: Workload) -> None:
    """Sample all conversations in one batch with `generate`, each turn until the longest reply is done."""
    contexts: list[list[int]] = [[] for _ in work.added]
    for index in range(len(work.added[0])):
        for context, prompts in zip(contexts, work.added, strict=True):
            context += prompts[index]
        lengths = [replies[index] for replies in work.replies]
        width = max(map(len, contexts))
        tokens = torch.tensor([[0] * (width - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        with torch.inference_mode():
            output = policy.model.generate(  # type: ignore[operator]
                input_ids=tokens,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(lengths),
                min_new_tokens=max(lengths),
                pad_token_id=0,
            )
        for context, row, length in zip(contexts, output.tolist(), lengths, strict=True):
            context += row[width : width + length]


# --- update -----------------------------------------------------------------------------------------------------------


def update(policy: Policy, batch: Batch, micro_batch_tokens: int) -> None:
    """Score as the trainer does: rows are sorted by length, and the output layer sees only sampled positions."""
    policy.zero_grad(set_to_none=True)
    for indices in batch.micro_batches(range(len(batch)), micro_batch_tokens):
        scores = policy.score(*batch.block(indices).inputs)
        scores.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]


def update_plainly(policy: Policy, episodes: Sequence[Episode], rows: int = 32) -> None:
    policy.zero_grad(set_to_none=True)
    for start in range(0, len(episodes), rows):
        tokens, sampled = [], []
        for episode in episodes[start : start + rows]:
            tokens.append([token for turn in episode.turns for token in (*turn.prompt, *turn.reply)])
            sampled.append(
                [flag for turn in episode.turns for flag in ([0] * len(turn.prompt) + [1] * len(turn.reply))]
            )
        width = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in tokens])
        where = torch.tensor([row + [0] * (width - len(row)) for row in sampled])
        logits = policy.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        (logprobs * where[:, 1:]).sum().backward()


# --- shares -----------------------------------------------------------------------------------------------------------


def read_shares(path: Path) -> dict[str, float]:
    """Return the shares of the time of all steps except the first one, which warms caches."""
    steps = [json.loads(line)["metrics"] for line in path.read_text().splitlines()][1:]
    steps = [step for step in steps if "time/step" in step]
    if not steps:
        raise SystemExit(f"{path} has no two steps with time/step")
    total = sum(step["time/step"] for step in steps)
    shares = {part: sum(step.get(f"time/{part}", 0.0) for step in steps) / total for part in PARTS}
    return shares | {"rest": max(0.0, 1 - sum(shares.values())), "seconds_per_step": total / len(steps)}


def print_tables(results: Sequence[Result], shares: dict[str, float], parameters: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("Part", "Way", "Tokens/s", "x transformers", title=f"{parameters / 1e6:.2f} M parameters")
    for index, result in enumerate(results):
        peer = results[index - index % 2]
        rate = f"{result.tokens_per_second:,.0f}"
        table.add_row(result.part, result.way, rate, f"{result.tokens_per_second / peer.tokens_per_second:.2f}")
    console.print(table)
    if shares:
        console.print(f"a step takes {shares['seconds_per_step']:.2f} s:", end=" ")
        console.print(", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != "seconds_per_step"))


if __name__ == "__main__":
    main()
