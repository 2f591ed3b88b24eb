"""The gateway before the real vLLM, in process and served: what was sampled is kept as it was, and scored alike."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.trainer.data.batch import samples_of
from starpod.trainer.data.files import read_groups
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policy import Policy, build_policy
from tests.support import ServerProcess
from tests.tools.gateway.test_process import control, play
from tests.trainer.engines.conformance import logprobs_under
from tests.trainer.engines.test_vllm_served import START_SECONDS, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TURNS = 3
TEMPERATURE = 0.7
HALF = 0.05
"""What log-probabilities may differ by: vLLM computes in half precision unless it is told otherwise."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    tiny = TinyConfig(hidden=64, layers=1, heads=2, intermediate=64, vocabulary=330, positions=64)
    return build_policy(ModelConfig(tiny=tiny), texts=["Up Down Left Right go on 0 1 2"], critic="none", seed=1)


@pytest.fixture(scope="module")
def model(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gateway") / "model"
    policy.save(folder)
    return folder


@pytest.fixture(params=["vllm", "vllm_remote"])
def gateway(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    limits = ["--max-tokens", "6", "--context", "64", "--temperature", str(TEMPERATURE)]
    command = [sys.executable, "-m", "starpod.cli.main", "gateway", str(model), "--folder", str(tmp_path), *limits]
    if request.param == "vllm":
        words = [*command, "--engine", "vllm"]
        process = ServerProcess(words, {"VLLM_CPU_KVCACHE_SPACE": "1"}, seconds=START_SECONDS)
        yield process
        process.close()
    else:
        with serving(model) as engine:
            process = ServerProcess([*command, "--engine", "vllm_remote", "--url", engine.url])
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
