"""`starpod train` and `starpod eval` called wrong: refused at once, with a sentence, and nothing is left behind."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from starpod.trainer.commands.train import _readable_error, commands, train
from starpod.trainer.configuration.config import StopConfig
from starpod.trainer.configuration.environment_file import remedies
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserFunction, load
from starpod.trainer.diagnostics.success import has_risen
from starpod.trainer.models.config import ModelConfig, ModelError
from starpod.trainer.models.hf import load_tokenizer
from starpod.trainer.parallel.ranks import RankFailed, RankRefused
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.ui.reading import find_runs


def run(*words: str) -> Result:
    return CliRunner().invoke(train, list(words))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["environment=sokban"], "did you mean sokoban-v1?"),
        (["--dry-run", "environment=bandit-v9"], "did you mean bandit-v1?"),
        (["--dry-run", "environment=sokoban"], "did you mean sokoban-v1?"),
        (["--resume", "--run-dir", "runs/none"], "runs/none holds no run to resume"),
        (["tiny", "--resume", "--run-dir", "runs/none"], "runs/none holds no run to resume"),
        (["--resume", "--run-dir", "runs/none", f"stages=[{'x' * 300}]"], "runs/none holds no run to resume"),
        (["--resume"], "name its folder with --run-dir"),
        (["tiny", "--change", "stages"], "--change stages is for a run that is resumed: add --resume"),
        (["--dry-run", "monitor.sinks.mlflow=true"], "the package mlflow is not installed: pip install mlflow"),
    ],
)
def test_a_wrong_call_leaves_nothing(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert told in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("bandit",), ("bandit", "--dry-run"), ("explored.py",)])
def test_a_folder_with_a_run_is_refused_at_once(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    (tmp_path / "explored.py").write_text("raise AssertionError('it was explored')")
    result = run(*words, "--run-dir", "run")
    assert result.exit_code == 2 and "run holds a run already. Continue it with --resume" in result.output


@pytest.mark.parametrize("words", [(), ("--resume-or-start",), ("--resume",), ("--dry-run",)])
def test_a_folder_with_a_configuration_of_the_user_is_refused_at_once(words: tuple[str, ...], tmp_path: Path) -> None:
    (file := tmp_path / "config.yaml").write_text("base: bandit")
    result = run(str(file), *words, "--run-dir", str(tmp_path))
    assert result.exit_code == 2 and f"{file} is not of a run" in result.output
    assert file.read_text() == "base: bandit" and [*tmp_path.iterdir()] == [file]


def test_servers_that_are_not_there_are_named_with_what_to_do(tmp_path: Path) -> None:
    words = ["bandit", "environment.addresses=127.0.0.1:1", "environment.patience=1", "threads=1"]
    result = run(*words, "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 1
    told = result.output.splitlines()[-1]
    assert "no server answers at 127.0.0.1:1: connection refused; start one with: starpod serve" in told
    assert "give the same command again" in told
    assert not list(tmp_path.iterdir())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")  # as after an iteration
    again = run(*words, "--resume", "--run-dir", str(tmp_path / "run"))
    assert f"continue with: starpod train --resume --run-dir {tmp_path}/run" in again.output


def test_a_function_of_a_users_file_that_fails_in_a_run_is_named_with_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function may fail in an update, after which nothing can be saved, or after changing the working folder."""
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("def helper(): return 1 / 0\ndef score(): return helper()\n")

    async def fail(_: object) -> None:
        os.chdir("/")
        UserFunction("score", load("algorithm.loss", f"{file}:score"))("")

    @asynccontextmanager
    async def open_run(*_: object, **__: object) -> AsyncIterator[object]:
        yield SimpleNamespace(progress=SimpleNamespace(step=3))

    monkeypatch.setattr("starpod.trainer.run.setup.open_run", open_run)
    monkeypatch.setattr("starpod.trainer.loop.train", fail)
    failure = f"Error: score failed: ZeroDivisionError: division by zero ({file}, line 1)"
    monkeypatch.chdir(tmp_path)
    told = run("bandit", "threads=1", "--run-dir", "run").output
    assert told == f"{failure}; give the same command again: nothing was trained yet\n"
    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    told = run("bandit", "threads=1", "--resume", "--run-dir", "run").output
    assert told.startswith(f"{failure}; the run is saved as of step 2; continue with: starpod train --resume"), told


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nonsense=3", "bandit-v1 has no option 'nonsense'. Options of bandit-v1: split: "),
        ("split=neither", "options.split: Input should be "),
    ],
)
def test_only_the_option_that_the_environment_refuses_is_reported(tmp_path: Path, word: str, told: str) -> None:
    result = run("bandit", f"environment.options.{word}", "threads=1", "--run-dir", str(tmp_path / "runs/a"))
    assert result.exit_code == 2
    assert " ".join(result.output.partition("Error: ")[2].split()).startswith(told)
    assert "iterations" not in result.output
    assert not list(tmp_path.iterdir())


def test_pages_show_a_run_before_its_demonstrations_and_a_refused_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def demonstrate(*_: object, **__: object) -> None:
        shown.extend(find_runs(tmp_path))
        raise ConfigError("no demonstrations")

    shown: list[str] = []
    monkeypatch.setattr("starpod.trainer.run.setup.demonstrate", demonstrate)
    assert run("bandit", "threads=1", "--run-dir", str(tmp_path / "a")).exit_code == 2
    assert (shown, list(tmp_path.iterdir())) == (["a"], [])


def test_a_reference_that_cannot_play_here_is_reported_before_anything_is_learnt(tmp_path: Path) -> None:
    words = ["frozen_lake", "environment.options.observation=grid", "warm_start.thought=", "warm_start.episodes=4"]
    words += ["evaluation.reference=[walk]", "monitor.screen=plain"]
    result = run(*words, "--run-dir", str(tmp_path / "runs/a"))
    assert result.exit_code == 2
    assert "remove walk from evaluation.reference: the reference policies `walk` and `careful` read" in result.output
    assert "imitat" not in result.output


def test_an_input_error_of_a_rank_is_a_usage_error_before_the_first_step(tmp_path: Path) -> None:
    config, error = load_config("tiny"), RankRefused("rank 0: remove walk")
    shown = _readable_error(error, config, tmp_path, None)
    assert isinstance(shown, click.UsageError) and shown.message == "rank 0: remove walk"
    begun = SimpleNamespace(progress=SimpleNamespace(step=3))
    assert _readable_error(error, config, tmp_path, cast(Any, begun)) is None
    assert _readable_error(RankFailed(), config, tmp_path, None) is None


def test_environments_of_servers_that_run_already_are_theirs_to_know() -> None:
    assert run("--dry-run", "environment=mine-v3", "environment.addresses=[127.0.0.1:1]").exit_code == 0
    assert run("--dry-run", "environment=mine-v3", "environment.serve=[mine.py]").exit_code == 0


@pytest.mark.parametrize("thought", ["{words[0]}", "{action} is best", "12", "yes: it is", "[up", '"quoted"', "up #1"])
def test_text_is_text(thought: str) -> None:
    config = load_config("tiny", [f"warm_start.thought={thought}", f"prompt.system={thought}"])
    assert config.warm_start.thought == config.prompt.system == thought.strip('"')
    assert load_config("tiny", ["prompt.system=null"]).prompt.system is None


def test_what_is_no_yaml_and_no_text_is_refused() -> None:
    result = run("--dry-run", "stop.iterations={1")
    assert result.exit_code == 2 and "not YAML" in result.output


def test_a_dry_run_prints_what_would_be_used() -> None:
    assert yaml.safe_load(run("--dry-run", "tiny", "seed=5").output)["seed"] == 5


def test_a_dry_run_estimates_memory_and_refuses_what_cannot_fit() -> None:
    told = run("--dry-run", "tiny").output
    assert "# Memory per device, GiB (estimated)" in told
    assert "weights" in told and "peak, of " in told
    refused = run("--dry-run", "tiny", "device=cpu", "model.tiny.hidden=16384", "model.tiny.layers=100")
    assert refused.exit_code == 2
    assert "Change the largest parts: optimiser (AdamW)" in refused.output.splitlines()[-1]
    room = run("--dry-run", "tiny", "engine.cache_gib=0.0001")
    assert room.exit_code == 2 and "engine.cache_gib" in room.output.splitlines()[-1]
    absent = run("--dry-run", "tiny", "model.name=nowhere/at-all")
    assert absent.exit_code == 0 and "# Memory is not estimated: " in absent.output
    elsewhere = run("--dry-run", "tiny", "device=cuda:99")
    assert elsewhere.exit_code == 0 and "# Memory is not estimated: device cuda:99 is not available" in elsewhere.output


def test_a_model_that_is_nowhere_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading would ask a hub that does not answer again and again."""
    asked: list[str] = []

    def ask(self: object, name: str, *, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(
        ModelError, match=r"'nonexist' is neither a folder here nor .* the hub cannot be reached: no route"
    ):
        load_tokenizer(ModelConfig(name="nonexist"))
    assert asked == ["nonexist"]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (["iterations", "minutes"], " stop.iterations=40 stop.minutes=3"),
        (["tokens"], " stop.tokens=16000000"),
        (["success"], " stop.success=null"),
        ([], ""),
        ([7, "nonsense"], ""),
        ("minutes", ""),
    ],
)
def test_the_command_that_continues_a_run_has_higher_limits(limits: object, words: str) -> None:
    """Whatever another program wrote into run.json."""
    stop = StopConfig(iterations=20, minutes=1.5, tokens=8_000_000, success=0.9).to_dict()
    folder = Path("runs/a")
    assert commands(folder, {"stop": stop}, limits)["go on"] == f"starpod train --resume --run-dir {folder}{words}"


def test_a_run_has_risen_if_an_evaluation_is_clearly_above_the_first_or_little_was_left_to_learn() -> None:
    def evaluations(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        return [{"success": success, "success_low": low} for success, low in pairs]

    assert has_risen([]) and has_risen(evaluations((0.1, 0.05)))
    assert has_risen(evaluations((0.1, 0.05), (0.3, 0.2), (0.1, 0.05))) and has_risen(
        evaluations((0.9, 0.8), (0.9, 0.8))
    )
    assert not has_risen(evaluations((0.1, 0.05), (0.15, 0.09)))
    graded = [{"success": 0.0, "success_low": 0.0, "return_mean": mean, "return_low": mean - 1} for mean in (2.0, 4.0)]
    assert has_risen(graded) and not has_risen(graded[::-1])
    assert remedies(WarmStartConfig(steps=1)) == "give the environment rewards on the way or easier starts"
    assert remedies(WarmStartConfig(steps=1, actions="random")).startswith("imitate the environment's `expert_action`")
