"""Comparison of the memory that `starpod train --dry-run` estimates with the peak of a real update on this CPU.

    python -m benchmarks.training.memory [CONFIG] [KEY=VALUE ...] [--json FILE]

It takes one step of the configured run without environments: the engine fills its cache with contexts of full length,
then the policy is trained on random episodes that fill the micro-batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

import torch

from benchmarks.machine import peak_bytes
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.group import Group
from starpod.trainer.engines.base import Engine, Request
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.learner import Learner
from starpod.trainer.models.config import TINY
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.run.memory import GIB, estimate_memory, place_of
from starpod.trainer.update import PolicyTrainer

WORDS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="tiny")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    config = load_config(arguments.config, ["device=cpu", *arguments.words])
    torch.set_num_threads(config.threads)
    estimate = estimate_memory(config, place_of("cpu"))
    asyncio.run(take_step(config))
    peak = peak_bytes()
    print("\n".join(estimate.table()))
    print(f"{peak / GIB:9.2f}  measured: {peak / estimate.total:.2f} of the estimate")
    if arguments.json is not None:
        figures = {"estimated": estimate.total, "measured": peak}
        arguments.json.write_text(json.dumps(figures) + "\n")


async def take_step(config: Config) -> None:
    """Sample with the engine once, and update the policy once. A tiny model gets a tokenizer of the full size."""
    rng = random.Random(0)
    texts = None
    if config.model.name == TINY:
        texts = [" ".join("".join(rng.choices(WORDS, k=6)) for _ in range(2 * config.model.tiny.vocabulary))]
    critic = config.model.critic if config.algorithm.needs_critic else "none"

    def build() -> Policy:
        return build_policy(config.model, texts=texts, critic=critic, seed=0)

    policy = build()
    max_tokens = config.sampling.max_episode_tokens
    engine = await sample(config, policy, rng)
    trainer = PolicyTrainer(
        policy, config.algorithm, config.optimizer, Parallel(), max_length=max_tokens, make_reference=build
    )
    if config.algorithm.needs_reference:
        trainer.freeze_reference(None)
    count = -(-2 * config.optimizer.micro_batch_tokens // max_tokens)
    groups = []
    for number in range(-(-count // 2)):
        members = []
        for member in range(2):
            prompt = [rng.randrange(policy.vocabulary) for _ in range(max_tokens // 2)]
            reply = [rng.randrange(policy.vocabulary) for _ in range(max_tokens - len(prompt))]
            turn = Turn(
                prompt=prompt,
                reply=reply,
                logprobs=[0.0] * len(reply),
                versions=[0] * len(reply),
                parts={"environment": float(member)},
                fresh=True,
            )
            members.append(Episode(number, member, "random", turns=[turn], end="terminal"))
        groups.append(Group(number, members))
    Learner({"": trainer}).learn(groups, version=1)
    await engine.close()


async def sample(config: Config, policy: Policy, rng: random.Random) -> Engine:
    """Build the engine, and let it reply to a context of full length in each slot. Returns the engine."""
    max_tokens = config.sampling.max_episode_tokens
    engine = build_engine(config.engine, policy, max_context=max_tokens)
    requests = [
        Request([rng.randrange(policy.vocabulary) for _ in range(max_tokens - 1)], max_tokens=1, stop=frozenset())
        for _ in range(engine.stats().slots)
    ]
    await asyncio.gather(*map(engine.generate, requests))
    return engine


if __name__ == "__main__":
    main()
