"""Real rollouts of verifiers over a real server; the model is a stub behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-adapters")

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.utils.loaders import resolve_env_config

from starpod.client.adapters.text import Setting
from tests.client.adapters.sessions import live_sessions

pytestmark = pytest.mark.filterwarnings("ignore")

Say = Callable[[list[dict[str, Any]]], str | web.Response]


class Endpoint:
    """Answers chat completions with what `say` makes of the messages."""

    def __init__(self) -> None:
        self.say: Say = lambda messages: "<answer>report</answer>" if len(messages) == 1 else "<answer>stop</answer>"
        self.base_url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = self.say(body["messages"])
        if isinstance(said, web.Response):
            return said
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "stub", "usage": usage}
        return web.json_response({**completion, "choices": [choice]})


@contextlib.asynccontextmanager
async def serve_endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serve_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def env(walk: Setting, monkeypatch: pytest.MonkeyPatch) -> vf.Env[EnvConfig]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    taskset = {"id": "walk-taskset", "addresses": walk.addresses, "environment": "walk-v1", "seeds": 3}
    return vf.load_environment(resolve_env_config({"taskset": taskset}))


async def roll_out(env: vf.Env[EnvConfig], endpoint: Endpoint, n: int = 1, tasks: int = 1) -> list[vf.Episode]:
    """Play episodes like the eval runner of verifiers."""
    client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="NO_SUCH_KEY")
    ctx = vf.ModelContext(model="stub", client=client, sampling=vf.SamplingConfig())
    slots = [slot for task in env.taskset.take(tasks) for slot in env.slots(task, n)]
    async with env.serving():
        return [await env.run_slot(slot, ctx) for slot in slots]


async def test_rollouts(env: vf.Env[EnvConfig], endpoint: Endpoint, walk: Setting) -> None:
    before = live_sessions(walk)
    episodes = await roll_out(env, endpoint, n=2, tasks=2)
    assert [episode.ok for episode in episodes] == [True] * 4, [episode.errors for episode in episodes]
    for episode in episodes:
        (trace,) = episode.traces
        assert trace.reward == 1.5 and trace.info["turn_rewards"] == [0.5, 1.0]
        assert trace.metrics["success"] == 1.0 and trace.metrics["reward/a"] == 0.25 and trace.num_turns == 2
        assert trace.stop_condition == "user_closed"
    starts = [episode.traces[0].branches[0].messages[0].content for episode in episodes]
    assert starts[0] == starts[1] != starts[2] == starts[3], "rollouts of one task begin in one state"
    assert live_sessions(walk) == before


async def test_a_failure_is_recorded_and_has_no_reward(
    env: vf.Env[EnvConfig], endpoint: Endpoint, walk: Setting
) -> None:
    before = live_sessions(walk)
    endpoint.say = lambda messages: "<answer>bug</answer>"
    (episode,) = await roll_out(env, endpoint)
    assert not episode.ok and "a bug on purpose" in episode.errors[0].message
    assert all(not trace.rewards for trace in episode.traces)
    assert live_sessions(walk) == before


async def test_an_endpoint_that_fails_earns_nothing(env: vf.Env[EnvConfig], endpoint: Endpoint, walk: Setting) -> None:
    before = live_sessions(walk)
    endpoint.say = lambda messages: (
        "<answer>report</answer>" if len(messages) == 1 else web.json_response({"error": "no"}, status=400)
    )
    (episode,) = await roll_out(env, endpoint)
    (trace,) = episode.traces
    assert not trace.ok and not trace.rewards
    assert live_sessions(walk) == before


async def test_a_limit_of_the_agent_scores_what_was_played(
    walk: Setting, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    taskset = {"id": "walk-taskset", "addresses": walk.addresses, "environment": "walk-v1"}
    env = vf.load_environment(resolve_env_config({"taskset": taskset, "agent": {"max_turns": 3}}))
    endpoint.say = lambda messages: "<answer>report</answer>"
    (episode,) = await roll_out(env, endpoint)
    assert episode.ok and episode.traces[0].reward == 1.5


def test_a_taskset_without_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(ValueError, match=r"--env\.taskset\.environment"):
        vf.load_environment(resolve_env_config({"taskset": {"id": "walk-taskset"}}))
