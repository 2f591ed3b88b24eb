"""verl's own agent-loop worker plays over a real server; only its engine is a stub, which speaks by a script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-adapters")

import numpy as np
import torch
from hydra import compose, initialize_config_module
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput

from starpod.client.adapters.text import Setting
from starpod.client.errors import EnvironmentBug
from tests.client.adapters.sessions import live_sessions
from tests.client.adapters.tiny import save_model

pytestmark = pytest.mark.filterwarnings("ignore")

LOOPS = """
- name: walk
  _target_: starpod.client.adapters.verl.StarpodAgentLoop
  setting:
    _target_: starpod.client.adapters.text.Setting
    _convert_: all
    addresses: {address}
    environment_id: walk-v1
"""
REPLY = "<|im_start|>assistant\n"


class Engine:
    """A fake of verl's LLMServerClient."""

    def __init__(self, reply: Any, logprobs: bool = True) -> None:
        self.reply = reply
        self.logprobs = logprobs
        self.requests: list[str] = []
        self.sampled: list[list[int]] = []
        self.tokenizer: Any = None

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        await asyncio.sleep(0)
        self.requests.append(request_id)
        text = self.reply(self.tokenizer.decode(prompt_ids).split(REPLY)[1:])
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.sampled.append(ids)
        step = len(self.sampled)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-float(token) - 1 for token in ids] if self.logprobs else None,
            extra_fields={"min_global_steps": step, "max_global_steps": step},
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def loops(walk: Setting, tmp_path: Path) -> Path:
    path = tmp_path / "loops.yaml"
    path.write_text(LOOPS.format(address=walk.addresses))
    return path


def make_worker(model: Path, loops: Path, engine: Engine, name: str = "walk", *more: str) -> AgentLoopWorker:
    """verl's own worker under its own configuration."""
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"{rollout}.name=vllm",
        f"{rollout}.prompt_length=600",
        f"{rollout}.response_length=600",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop={name}",
        *more,
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        worker = AgentLoopWorker(compose("ppo_trainer", overrides=overrides), engine)
    engine.tokenizer = worker.tokenizer
    return worker


def make_batch(*infos: dict[str, Any]) -> DataProto:
    def column(values: list[Any]) -> np.ndarray:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    prompts = [[{"role": "user", "content": "Play."}] for _ in infos]
    return DataProto(non_tensor_batch={"raw_prompt": column(prompts), "extra_info": column(list(infos))})


def report_then_stop(said: list[str]) -> str:
    return "<answer>report</answer>" if len(said) == 1 else "<answer>stop</answer>"


async def test_episodes(walk: Setting, model: Path, loops: Path) -> None:
    engine = Engine(report_then_stop)
    worker = make_worker(model, loops, engine)
    before = live_sessions(walk)
    out = await worker.generate_sequences(make_batch({"seed": 3}, {"seed": 3}, {"seed": np.int64(4)}))
    assert out.batch["rm_scores"].sum(-1).tolist() == [1.5, 1.5, 1.5]
    assert list(out.non_tensor_batch["turn_scores"]) == [[0.5, 1.0]] * 3
    assert out.non_tensor_batch["success"].tolist() == [1.0] * 3
    assert out.non_tensor_batch["__num_turns__"].tolist() == [4] * 3
    assert out.non_tensor_batch["min_global_steps"][0] < out.non_tensor_batch["max_global_steps"][0]
    prompts = [worker.tokenizer.decode(row, skip_special_tokens=True) for row in out.batch["prompts"]]
    assert prompts[0] == prompts[1] != prompts[2], "a group has one start"
    mask, responses = out.batch["response_mask"].bool(), out.batch["responses"]
    trained = sorted(responses[row][mask[row]].tolist() for row in range(3))
    spoken: dict[str, list[int]] = {}
    for request, ids in zip(engine.requests, engine.sampled, strict=True):
        spoken.setdefault(request, []).extend(ids)
    assert trained == sorted(spoken.values()), "what was sampled is what is trained, token by token"
    logprobs = out.batch["rollout_log_probs"]
    assert torch.equal(logprobs, torch.where(mask, -responses.float() - 1, 0.0))
    assert live_sessions(walk) == before


async def test_without_log_probabilities(model: Path, loops: Path) -> None:
    worker = make_worker(model, loops, Engine(report_then_stop, logprobs=False))
    out = await worker.generate_sequences(make_batch({"seed": 3}))
    assert "rollout_log_probs" not in out.batch and out.batch["rm_scores"].sum() == 1.5


@pytest.mark.parametrize(
    ("override", "earned"),
    [
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", 1.5),
        ("actor_rollout_ref.rollout.response_length=100", 1.0),
        ("actor_rollout_ref.rollout.response_length=10", 0.0),  # the action is beyond the tokens that are trained on
    ],
)
async def test_an_episode_that_is_cut_keeps_what_it_earned(
    model: Path, loops: Path, override: str, earned: float
) -> None:
    worker = make_worker(model, loops, Engine(lambda said: "<answer>report</answer>"), "walk", override)
    out = await worker.generate_sequences(make_batch({"seed": 3}))
    assert out.batch["rm_scores"].sum() == earned
    assert out.batch["responses"].shape[1] == worker.rollout_config.response_length
    assert np.isnan(out.non_tensor_batch["success"][0]), "an unfinished episode has no success value"


async def test_a_failure_is_raised(walk: Setting, model: Path, loops: Path) -> None:
    before = live_sessions(walk)
    worker = make_worker(model, loops, Engine(lambda said: "<answer>bug</answer>"))
    with pytest.raises(EnvironmentBug):
        await worker.generate_sequences(make_batch({"seed": 3}))
    with pytest.raises(ValueError, match="No seed"):
        await worker.generate_sequences(make_batch({}))
    assert live_sessions(walk) == before
