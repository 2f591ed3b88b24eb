"""The gateway before the real vLLM: what was sampled is kept as it was, and scored alike.

Behind servers it samples as the engine vllm_remote does, which has tests of its own.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.trainer.data.files import read_groups
from starpod.trainer.data.sample import samples_of
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policy import Policy, build_policy
from tests.support import ServerProcess
from tests.tools.gateway.test_process import control, play
from tests.trainer.engines.conformance import logprobs_under
from tests.trainer.engines.real_vllm import START_SECONDS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TURNS = 3
TEMPERATURE = 0.7
HALF = 0.05
"""Tolerance of log-probabilities: vLLM computes in half precision by default."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    tiny = TinyConfig(hidden=64, layers=1, heads=2, intermediate=64, vocabulary=330, positions=64)
    return build_policy(ModelConfig(tiny=tiny), texts=["Up Down Left Right go on 0 1 2"], critic="none", seed=1)


@pytest.fixture
def gateway(policy: Policy, tmp_path: Path) -> Iterator[ServerProcess]:
    policy.save(tmp_path / "model")
    limits = ["--max-tokens", "6", "--max-model-len", "64", "--temperature", str(TEMPERATURE)]
    words = ["gateway", str(tmp_path / "model"), "--out", str(tmp_path), "--engine", "vllm", *limits]
    command = [sys.executable, "-m", "starpod.cli.main", *words]
    process = ServerProcess(command, {"VLLM_CPU_KVCACHE_SPACE": "1"}, seconds=START_SECONDS)
    yield process
    process.close()


def test_what_was_sampled_is_kept_as_it_was(gateway: ServerProcess, policy: Policy, tmp_path: Path) -> None:
    messages = play(gateway.address, "one", TURNS)
    assert play(gateway.address, "one", TURNS) == messages, "a repeated request has the same reply"
    control(gateway.address, "/sessions/one/end", success=True)
    (group,) = read_groups(tmp_path / "episodes")
    (episode,) = group.episodes
    assert [turn.text for turn in episode.turns] == [message["content"] for message in messages[1::2]]
    assert [turn.fresh for turn in episode.turns] == [True, *[False] * (TURNS - 1)]
    (sample,) = samples_of(episode)
    context: list[int] = []
    for turn in episode.turns:
        context += turn.prompt
        expected = logprobs_under(policy.model, context, turn.reply, TEMPERATURE)
        assert turn.logprobs == pytest.approx(expected, abs=HALF)
        context += turn.reply
    assert sample.tokens == context
