"""Persistence by itself: what an error leaves saved."""

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, StateCopy, load_checkpoint
from starpod.trainer.checkpoints.folders import list_checkpoints
from starpod.trainer.configuration.config import Config
from starpod.trainer.output.screen import Screen
from starpod.trainer.run.evaluating import Evaluating
from starpod.trainer.run.interrupts import Interrupted
from starpod.trainer.run.persistence import Persistence, Persistent
from starpod.trainer.run.progress import Progress
from tests.trainer.run.scripted_run import make_shared
from tests.trainer.run.test_collecting import make_collecting
from tests.trainer.run.test_evaluating import make_evaluating


class Learner:
    """A learner with one weight."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def reference_state(self) -> dict[str, Any]:
        return {}

    def policy_state(self) -> dict[str, Any]:
        return {"weight": self.weight}


def make_persistence(tmp_path: Path, told: list[str]) -> tuple[Persistence, Progress, Learner, Evaluating]:
    config = Config()
    progress, learner, evaluating = Progress(), Learner(), make_evaluating(tmp_path / "run", [])
    warm_start = SimpleNamespace(state=lambda: ({}, {}), over=True)
    held = Persistent(
        learner=cast(Any, learner),
        scorer=None,
        warm_start=cast(Any, warm_start),
        collecting=make_collecting(),
        evaluating=evaluating,
        parts={},
    )
    screen = Screen()
    cast(Any, screen).warn = told.append
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", config.checkpoint)
    shared = make_shared(config, progress=progress, screen=screen)
    return Persistence(shared, held, checkpoints), progress, learner, evaluating


async def test_an_error_is_survived_by_the_last_step_whose_weights_were_whole(tmp_path: Path) -> None:
    persistence, progress, learner, _ = make_persistence(tmp_path, [])
    error = RuntimeError("out of memory")
    await persistence.rescue(error)  # before the warm start is over
    persistence.finish_step()
    persistence.begin_step()
    progress.step += 1
    persistence.begin_update()
    learner.weight += 1
    await persistence.rescue(error)  # in the middle of an update
    assert persistence.checkpoints.latest() is None
    persistence.finish_step()
    persistence.begin_step()
    progress.step += 1  # and nothing was learnt in it yet
    await persistence.rescue(error)
    loaded = persistence.checkpoints.latest()
    assert loaded is not None and loaded.step == loaded.state["step"] == 1
    assert loaded.tensors["policy"]["weight"].item() == 1.0


async def test_a_checkpoint_is_written_while_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persistence, progress, learner, _ = make_persistence(tmp_path, [])
    disk, write = threading.Event(), Checkpoints.write

    def slowly(checkpoints: Checkpoints, snapshot: StateCopy) -> Path:
        assert disk.wait(60)
        return write(checkpoints, snapshot)

    monkeypatch.setattr(Checkpoints, "write", slowly)
    persistence.finish_step()
    await persistence.save()
    progress.step += 1
    learner.weight += 1
    assert persistence.checkpoints.latest() is None
    another = asyncio.ensure_future(persistence.save())
    await asyncio.sleep(0)
    assert not another.done(), "one at a time"
    disk.set()
    await another
    await persistence.finish_writing()
    steps = [load_checkpoint(each.path) for each in list_checkpoints(persistence.checkpoints.folder)]
    assert [(loaded.step, loaded.tensors["policy"]["weight"].item()) for loaded in steps] == [(1, 1.0), (0, 0.0)]


async def test_a_checkpoint_that_cannot_be_saved_does_not_hide_why_the_run_ended(tmp_path: Path) -> None:
    told: list[str] = []
    persistence, *_ = make_persistence(tmp_path, told)
    persistence.finish_step()
    shutil.rmtree(persistence.checkpoints.folder)
    persistence.checkpoints.folder.touch()
    await persistence.rescue(RuntimeError("the engine is dead"))
    assert "could not be saved" in told[0]
    with pytest.raises(CheckpointError, match="could not be saved"):
        await persistence.rescue(Interrupted())  # which has nothing else to tell
    with pytest.raises(CheckpointError, match="of step 0 could not be saved"):
        await persistence.rescue(CheckpointError("an earlier checkpoint could not be saved"))
