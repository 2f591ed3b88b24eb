"""Errors before a run starts: nothing is started or written."""

import contextlib
import importlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

import starpod.trainer
from starpod.client import Fleet, Want
from starpod.trainer.commands.train import train
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.preflight import check, check_environment
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.models import policy
from starpod.trainer.models.config import LoraConfig, ModelConfig, ModelError
from starpod.trainer.models.policies import copy_trained
from starpod.trainer.models.policy import build_policy
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.config import Facts
from starpod.trainer.rollout.environment import read_facts
from starpod.trainer.run import setup
from tests.support import ServerProcess
from tests.trainer.models.tiny_policy import tiny_policy


def test_an_engine_on_several_gpus_needs_as_many_processes_on_each_machine() -> None:
    check(parse_config({"engine": "vllm"}), world=2)
    shared = parse_config({"engine": {"name": "vllm", "tensor_parallel": 2}})
    check(shared, world=6, local_world=2)
    with pytest.raises(ConfigError, match=r"each machine has 3 processes .* groups of 2"):
        check(shared, world=6, local_world=3)


STATES = {"advantage": {"kind": "terms", "terms": [{"unit": "turn", "score": "to_go", "key": ["state"]}]}}
WITHOUT = Facts(("Left",), state_key=False, fork=False, expert=False, score=False, image=False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algorithm": "gigpo"}, "state_key"),
        ({"algorithm": STATES}, "state_key"),
        ({"environment": {"id": "lake", "expert_moves_left": 2}}, "has no expert: drop it"),
        ({"collect": {"search": {"strategy": "beam"}}}, "has none; set collect.search.score to reward"),
        ({"collect": {"search": {"strategy": "beam", "score": "reward"}}}, "cannot be forked"),
        ({"script": "attempts", "algorithm": "score"}, "set script to solo"),
    ],
)
async def test_what_an_environment_cannot_do_is_refused(values: dict[str, Any], words: str) -> None:
    config = parse_config(values)
    with pytest.raises(ConfigError, match=words):
        await check_environment(config, config.tasks[0], cast(Any, None), WITHOUT)


async def test_options_of_stages_levels_and_evaluations_are_tried_before_anything_is_played() -> None:
    levels = {"levels": [{"holes": 1}, {"holes": 2}]}
    config = parse_config(
        {
            "environment": {"id": "lake", "options": {"size": 4}, "curriculum": levels},
            "evaluation": {"options": {"holes": 3}},
            "stages": [{"until": {"iteration": 1}, "set": {"environment.options": {"size": 3}}}],
        }
    )
    opened: list[Any] = []

    async def open_(environment: str, **given: Any) -> list[Any]:
        opened.append(given["options"])
        return []

    whole = Facts(("Left",), state_key=True)
    await check_environment(config, config.tasks[0], cast(Any, SimpleNamespace(open=open_)), whole)
    assert opened == [
        {"size": 4, "holes": 3},
        {"size": 3, "holes": 1},
        {"size": 3, "holes": 2},
        {"size": 4, "holes": 1},
        {"size": 4, "holes": 2},
    ]


def test_an_estimator_of_a_users_file_gets_the_state_keys_that_there_are() -> None:
    config = parse_config({"environment": "lake", "algorithm": {"advantage": "examples/own_methods.py:median"}})
    assert setup._want(config, WITHOUT, image=False) == Want()
    assert setup._want(config, replace(WITHOUT, state_key=True), image=False) == Want(state_key=True)
    plain = parse_config({"environment": "lake", "algorithm": "starpo-grpo"})
    assert setup._want(plain, replace(WITHOUT, state_key=True), image=False) == Want()


async def test_rewards_are_tried_on_a_whole_episode_before_anything_is_imitated(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def ending(turn, transition, view):\n    return 1.0 if not view.end else 1 / 0\n"
    )
    shaping = {f"{tmp_path}/mine.py:ending": 1.0}
    config = parse_config({"environment": "bandit-v1", "rewards": {"shaping": shaping}})
    async with Fleet(server.address) as fleet:
        facts = await read_facts(fleet, config.tasks[0].environment)
        with pytest.raises(UserCodeError, match=r"'ending' failed on turn .* of bandit-v1.* \(.*mine\.py, line 2\)"):
            await check_environment(config, config.tasks[0], fleet, facts)


async def test_a_pretrained_model_that_cannot_be_scored_is_refused_before_demonstrations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_policy().save(tmp_path / "model")

    async def serve(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(setup, "_serve_all", serve)
    monkeypatch.setattr(setup, "telling", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(setup, "demonstrate", lambda *_: pytest.fail("it played"))
    monkeypatch.setattr(policy, "splits_cleanly", lambda model: False)
    config = parse_config({"model": str(tmp_path / "model"), "warm_start": {"steps": 1}})
    settings: dict[str, Any] = {"resume": False, "parallel": Parallel(), "screen": Screen(), "interrupts": None}
    with pytest.raises(ModelError, match="scales or caps its logits"):
        async with setup.open_run(config, tmp_path / "run", **settings):
            pass


def test_several_processes_must_be_told_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(train, [])
    assert told.exit_code == 2
    assert "--run-dir" in told.output


def test_a_sampling_copy_has_its_own_trained_weights_and_shares_frozen_ones(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    config = ModelConfig(name=str(tmp_path), lora=LoraConfig(rank=4))
    for each in (tiny_policy(), build_policy(config, texts=None, critic="none", seed=1)):
        copied = copy_trained(each)
        pairs = list(zip(each.parameters(), copied.parameters(), strict=True))
        assert all((one is other) != one.requires_grad for one, other in pairs)
        assert all(one.equal(other) for one, other in pairs)
        with torch.no_grad():
            for parameter in each.trained_parameters():
                parameter += 1
        sharding.copy_weights(each.model, copied.model)
        assert all(one.equal(other) for one, other in pairs)


def test_torch_keeps_compiled_code_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cache, folder in ((tmp_path, str(tmp_path / "starpod" / "torchinductor")), (Path(__file__) / "none", None)):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        importlib.reload(starpod.trainer)
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder


def test_a_resumption_names_the_files_of_the_user_that_changed(tmp_path: Path) -> None:
    loss, shaping = tmp_path / "loss.py", tmp_path / "shaping.py"
    for file in (loss, shaping):
        file.write_text("")
    rewards = {"shaping": {f"{shaping}:bonus": 1.0}}
    stages = [{"until": {"iteration": 2}, "set": {"algorithm.loss": f"{loss}:own"}}]
    config = parse_config({"environment": "bandit-v1", "rewards": rewards, "stages": stages})
    told: list[str] = []
    screen = cast(Any, SimpleNamespace(warn=told.append))
    folder = RunFolder.create(tmp_path / "run")
    for texts in ("", "x = 1", "x = 1"):
        for file in (loss, shaping):
            file.write_text(texts)
        setup._record(config, folder, screen, resume=True)
    assert told == [f"changed since this run last started: {loss}, {shaping}"]
