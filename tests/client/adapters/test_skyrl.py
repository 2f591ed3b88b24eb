"""SkyRL's registry makes the environment and threads step it, as SkyRL's generator does."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("skyrl_gym", reason="SkyRL-gym is not installed: make test-adapters")

import skyrl_gym
from skyrl_gym.envs.registration import deregister
from skyrl_gym.metrics import aggregate_for_environment

from starpod.client.adapters.text import Setting
from starpod.client.errors import EnvironmentBug
from tests.client.adapters.sessions import live_sessions

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}]


@pytest.fixture
def name(walk: Setting) -> Iterator[str]:
    name = f"walk-{uuid.uuid4()}"
    skyrl_gym.register(name, "starpod.client.adapters.skyrl:StarpodEnv", kwargs={"setting": walk})
    yield name
    deregister(name)


def make(name: str, **extras: Any) -> Any:
    """Make an environment like SkyRLGymGenerator.agent_loop, which adds max_turns to the row's columns."""
    return skyrl_gym.make(name, env_config={}, extras={"max_turns": 5, "data_source": "x", **extras})


def test_an_episode(name: str, walk: Setting) -> None:
    before = live_sessions(walk)
    env = make(name, seed=7)
    prompt, metadata = env.init(PROMPT)
    assert prompt[0] == PROMPT[0] and prompt[1]["content"].startswith("Play.\n\n") and metadata["seed"] == 7
    report = env.step("<answer>report</answer>")
    assert report["reward"] == 0.5 and not report["done"] and report["metadata"]["reward/a"] == 0.25
    (observation,) = report["observations"]
    assert observation["role"] == "user" and observation["content"].startswith("at ")
    assert env.step("hm")["observations"][0]["content"].startswith("Your reply held no valid action.")
    last = env.step("<answer>stop</answer>")
    assert last == {"observations": [], "reward": 1.0, "done": True, "metadata": env.get_metrics()}
    env.close()
    env.close()
    assert live_sessions(walk) == before
    assert aggregate_for_environment(name, [env.get_metrics()] * 2)["success"] == 1.0


def test_skyrls_limit_of_turns_ends_the_episode(name: str) -> None:
    env = make(name, seed=7, max_turns=2)
    env.init(PROMPT)
    assert [env.step("<answer>Left</answer>")["done"] for _ in range(2)] == [False, True]
    env.close()


def test_a_failure_is_raised_and_leaves_no_session(name: str, walk: Setting) -> None:
    before = live_sessions(walk)
    env = make(name, seed=7)
    env.init(PROMPT)
    with pytest.raises(EnvironmentBug):
        env.step("<answer>bug</answer>")
    assert live_sessions(walk) == before
    with pytest.raises(ValueError, match="No seed"):
        make(name).init(PROMPT)


async def test_many_at_once_in_threads(name: str) -> None:
    """Two groups of eight, each step in an executor of the generator's kind."""
    loop = asyncio.get_running_loop()

    async def play(seed: int) -> tuple[str, float]:
        env = make(name, seed=seed)
        prompt, _ = await loop.run_in_executor(pool, env.init, PROMPT)
        rewards = []
        for reply in ("<answer>Right</answer>", "<answer>report</answer>", "<answer>stop</answer>"):
            rewards.append((await loop.run_in_executor(pool, env.step, reply))["reward"])
        await loop.run_in_executor(pool, env.close)
        return prompt[-1]["content"], sum(rewards)

    with ThreadPoolExecutor(8) as pool:
        played = await asyncio.gather(*(play(seed) for seed in [1] * 8 + [2] * 8))
    assert {reward for _, reward in played} == {1.5}
    starts = [start for start, _ in played]
    assert len(set(starts[:8])) == len(set(starts[8:])) == 1 and starts[0] != starts[8]
