"""Comparison of one coroutine per episode with a lock-step loop, for environments with steps of 5 to 500 ms.

    python -m benchmarks.training.collection [--groups 32] [--size 8] [--turns 8] [--rounds 3]

Both ways play the same episodes, token for token: they have the same small policy, which has learnt the format from
random play, and the same engine, server process and seeds, so that delays are equal, too. In the lock-step loop, all
environments step, and all replies are generated once the slowest step is done. The ways take turns, and figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.results import picture, print_table, write_result
from benchmarks.serving.environments import delay
from starpod.client import Fleet
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import episodes_of
from starpod.trainer.engines.base import Engine, EngineStats, Reply, Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import local_services, make_task
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import collect_demonstrations
from starpod.trainer.warm_start.imitation import Imitation
from starpod.trainer.warm_start.teacher import DemonstrationWriter

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = "slow_lake-v1"
OPTIONS = {"observation": "local", "frozen_probability": 0.9, "success_rate": 1.0, "size": 6}
PROMPT = PromptConfig(style="compact")
SAMPLING = SamplingConfig(max_reply_tokens=16, max_episode_tokens=512)
LOCK_STEP, COROUTINES = "lock step", "one coroutine each"


class LockStep(Engine):
    """Wrapper of an engine that keeps all episodes in lock step, with a barrier before and after they generate.

    `forget` ends an episode, so that the others no longer wait for it.
    """

    def __init__(self, engine: Engine, episodes: int) -> None:
        self._engine = engine
        self._playing = episodes
        self._here: list[asyncio.Future[None]] = []

    async def generate(self, request: Request) -> Reply:
        await self._meet()
        reply = await self._engine.generate(request)
        await self._meet()
        return reply

    def forget(self, conversation: str) -> None:
        self._engine.forget(conversation)
        self._playing -= 1
        self._go_if_complete()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def _meet(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._here.append(future)
        self._go_if_complete()
        await future

    def _go_if_complete(self) -> None:
        if len(self._here) >= self._playing:
            for future in self._here:
                if not future.done():
                    future.set_result(None)
            self._here.clear()


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a collection. idle: share of the time in which the engine computed nothing."""

    way: str
    seconds: float
    episodes: int
    steps: int
    tokens: int
    idle: float


COLLECTION_HEAD = ("Way", "Episodes/s", "Steps/s", "Engine idle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8, help="episodes of a group")
    parser.add_argument("--turns", type=int, default=8, help="of an episode, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shortest", type=float, default=0.005, help="seconds of a step, at least")
    parser.add_argument("--longest", type=float, default=0.5, help="seconds of a step, at most")
    parser.add_argument("--imitate", type=int, default=60, help="optimiser steps in which the policy learns the format")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = asyncio.run(measure(arguments))
    rows = [asdict(result) for result in results]
    print_table(COLLECTION_HEAD, collection_rows(rows))
    write_result(arguments.out / "collection.json", {"results": rows})
    write_plot(arguments.out / "collection.svg", results, arguments.shortest, arguments.longest)


async def measure(arguments: argparse.Namespace) -> list[Result]:
    environment = EnvironmentConfig(
        id=ENVIRONMENT,
        options=OPTIONS | {"shortest": arguments.shortest, "longest": arguments.longest},
        max_turns=arguments.turns,
        max_actions_per_turn=1,
        max_actions=arguments.turns,
    )
    episodes = arguments.groups * arguments.size
    # One thread per episode, so that a step waits only for its own delay.
    serve = (str(ROOT / "benchmarks" / "serving" / "environments.py"), "--threads", str(episodes))
    results: list[Result] = []
    with local_services([ENVIRONMENT], arguments=serve) as address:
        async with Fleet(address) as fleet:
            spec = next(spec for spec in await fleet.describe() if spec.id == ENVIRONMENT)
            actions = tuple(spec.action_space.names)
            policy = await teach(fleet, environment, actions, arguments.imitate)
            template = Template(policy.tokenizer, prefill=PROMPT.opening)
            starts = [Start(index, index) for index in range(arguments.groups)]
            last_episodes: list[Episode] | None = None
            for _ in range(arguments.rounds):
                for way in (LOCK_STEP, COROUTINES):
                    engine: Engine = TorchEngine(policy, slots=episodes, max_context=SAMPLING.max_episode_tokens)
                    agents = EngineAgents(
                        engine=LockStep(engine, episodes) if way == LOCK_STEP else engine,
                        template=template,
                        prompt=PROMPT,
                        sampling=SAMPLING,
                    )
                    rewards = Rewards(RewardConfig())
                    collector = Collector(
                        fleet=fleet, agents=agents, task=make_task(environment, actions), rewards=rewards
                    )
                    result, new_episodes = await collect(way, collector, starts, arguments.size)
                    await engine.close()
                    if last_episodes is not None:
                        check(last_episodes, new_episodes)
                    last_episodes = new_episodes
                    results.append(result)
    return results


async def teach(fleet: Fleet, environment: EnvironmentConfig, actions: Sequence[str], steps: int) -> Policy:
    """Return a tiny policy that replies in the format, with random actions."""
    quick = environment.model_copy(update={"options": {**environment.options, "shortest": 0.0}})
    config = WarmStartConfig(steps=steps, episodes=300, actions="random", noise=0.0)
    demonstrations = await collect_demonstrations(fleet, config, make_task(quick, actions), range(1000, 1300))
    writer = DemonstrationWriter(config, PROMPT, actions)
    policy = build_policy(ModelConfig(), texts=await writer.texts(demonstrations), critic="none", seed=1)
    template = Template(policy.tokenizer, prefill=PROMPT.opening)
    episodes = [
        await writer.episode(demonstration, template, index) for index, demonstration in enumerate(demonstrations)
    ]
    imitation = Imitation(policy, episodes, config, Parallel(), lr=0.005, micro_batch_tokens=8192)
    losses: list[float] = []
    await asyncio.to_thread(imitation.run, lambda step, loss: losses.append(loss))
    print(f"the policy has learnt the format to {losses[-1]:.2f} nats per token", file=sys.stderr)
    return policy


async def collect(
    way: str, collector: Collector[EngineAgents], starts: Sequence[Start], size: int
) -> tuple[Result, list[Episode]]:
    engine = collector.agents.engine
    before, start = engine.stats(), perf_counter()
    batch = await collector.collect(starts, size)
    seconds, after = perf_counter() - start, engine.stats()
    if batch.failed:
        raise RuntimeError(f"{batch.failed} episodes failed")
    episodes = episodes_of(batch.groups)
    return Result(
        way,
        seconds,
        len(episodes),
        sum(turn.executed for episode in episodes for turn in episode.turns),
        after.sampled - before.sampled,
        1 - (after.seconds - before.seconds) / seconds,
    ), episodes


def check(one: Sequence[Episode], other: Sequence[Episode]) -> None:
    """Raise RuntimeError if the two ways played differently, because their times would not be comparable."""
    for a, b in zip(one, other, strict=True):
        if [(turn.reply, turn.actions, turn.reward) for turn in a.turns] != [
            (turn.reply, turn.actions, turn.reward) for turn in b.turns
        ]:
            raise RuntimeError(f"group {a.group}, member {a.member} was played differently")


def collection_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each way: episodes and steps per second, and the share of the time that the engine is idle."""
    rows = []
    for way in dict.fromkeys(result["way"] for result in results):
        rounds = [result for result in results if result["way"] == way]
        seconds, idle = (statistics.median(result[key] for result in rounds) for key in ("seconds", "idle"))
        speeds = [f"{rounds[0]['episodes'] / seconds:.1f}", f"{rounds[0]['steps'] / seconds:.0f}"]
        rows.append([way, *speeds, f"{idle:.0%}".replace("%", " %")])
    return rows


def write_plot(path: Path, results: Sequence[Result], shortest: float, longest: float) -> None:
    """Plot episodes per second of both ways, and the distribution of step times."""
    ways = (LOCK_STEP, COROUTINES)
    with picture(path, columns=2, figsize=(9, 3.5)) as (_, (rates, delays)):
        for index, way in enumerate(ways):
            speeds = [result.episodes / result.seconds for result in results if result.way == way]
            rates.bar(index, statistics.median(speeds), width=0.6, color=("#9aa5b1", "#2f7ed8")[index])
            rates.plot([index] * len(speeds), speeds, "k.", markersize=5)
        rates.set(ylabel="episodes per second")
        rates.set_xticks(range(len(ways)), ways)
        sample = sorted(1000 * delay(seed, 1, shortest, longest) for seed in range(5000))
        delays.plot(sample, [1 - rank / len(sample) for rank in range(len(sample))], color="#2f7ed8")
        delays.set(xscale="log", xlabel="a step takes longer than this, in ms", ylabel="share of the steps")
        delays.grid(alpha=0.3)


if __name__ == "__main__":
    main()
