"""What cannot work is refused before anything is started or written."""

from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from starpod.trainer import setup
from starpod.trainer.commands.train import train
from starpod.trainer.config import Config, ConfigError
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel import Parallel


async def open_run(config: Config, path: Path, parallel: Parallel) -> None:
    interrupts = cast(Any, None)
    async with setup.open_run(config, path, resume=False, parallel=parallel, screen=Screen(), interrupts=interrupts):
        raise AssertionError("it began")


@pytest.mark.parametrize("engine", [{"name": "vllm"}, {"name": "vllm_remote", "urls": ["http://127.0.0.1:1"]}])
async def test_engines_of_one_process_are_refused_under_torchrun(tmp_path: Path, engine: dict[str, Any]) -> None:
    config = Config.model_validate({"engine": engine})
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
