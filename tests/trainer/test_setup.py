"""What cannot work is refused before anything is started or written."""

import importlib
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

import starpod.trainer
from starpod.trainer import setup
from starpod.trainer.commands.train import train
from starpod.trainer.config import Config, ConfigError
from starpod.trainer.models.config import LoraConfig, ModelConfig
from starpod.trainer.models.policies import copy_trained
from starpod.trainer.models.policy import build_policy
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel import Parallel
from tests.trainer.models.tiny_policy import tiny_policy


async def open_run(config: Config, path: Path, parallel: Parallel) -> None:
    interrupts = cast(Any, None)
    async with setup.open_run(config, path, resume=False, parallel=parallel, screen=Screen(), interrupts=interrupts):
        raise AssertionError("it began")


async def test_the_engine_of_one_process_is_refused_under_torchrun(tmp_path: Path) -> None:
    config = Config.model_validate({"engine": "vllm"})
    with pytest.raises(ConfigError, match="engine=torch"):
        await open_run(config, tmp_path / "run", Parallel(1, 2))
    assert not (tmp_path / "run").exists()


STATES = {"advantage": "terms", "terms": [{"unit": "turn", "score": "to_go", "key": ["state"]}]}


@pytest.mark.parametrize("algorithm", ["gigpo", STATES], ids=["gigpo", "terms"])
async def test_an_environment_without_state_keys_is_refused_where_states_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any
) -> None:
    class Nothing:
        async def __aenter__(self) -> "Nothing":
            return self

        async def __aexit__(self, *_: object) -> None: ...

    async def facts(fleet: object, environment_id: str) -> setup.Facts:
        return setup.Facts(("Left",), state_key=False)

    monkeypatch.setattr(setup, "connect", lambda config: Nothing())
    monkeypatch.setattr(setup, "read_facts", facts)
    with pytest.raises(ConfigError, match="state_key"):
        await open_run(Config.model_validate({"algorithm": algorithm}), tmp_path / "run", Parallel())


def test_several_processes_must_be_told_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(train, [])
    assert told.exit_code == 2
    assert "--run-dir" in told.output


def test_a_copy_to_sample_from_has_its_own_of_what_is_trained_and_shares_what_is_frozen(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    config = ModelConfig(name=str(tmp_path), lora=LoraConfig(rank=4))
    for policy in (tiny_policy(), build_policy(config, texts=None, critic="none", seed=1)):
        copied = copy_trained(policy)
        pairs = list(zip(policy.parameters(), copied.parameters(), strict=True))
        assert all((one is other) != one.requires_grad for one, other in pairs)
        assert all(one.equal(other) for one, other in pairs)
        with torch.no_grad():
            for parameter in policy.trained_parameters():
                parameter += 1
        Parallel().copy_weights(policy.model, copied.model)
        assert all(one.equal(other) for one, other in pairs)


def test_torch_keeps_compiled_code_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cache, folder in ((tmp_path, str(tmp_path / "starpod" / "torchinductor")), (Path(__file__) / "none", None)):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        importlib.reload(starpod.trainer)
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder
