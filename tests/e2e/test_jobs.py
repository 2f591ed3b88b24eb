"""The jobs that come with the package train, from the outside: each takes an iteration with a tiny policy."""

from pathlib import Path

import pytest

from tests.support import ServerProcess
from tests.training import lines, train

SMALL = (
    "warm_start.steps=1",
    "warm_start.episodes=4",
    "collect.groups=2",
    "collect.group_size=2",
    "evaluation.episodes=1",
    "evaluation.reference=[]",
    # Whatever they earned.
    "algorithm.filter.strategy=none",
    "algorithm.filter.value=null",
    "algorithm.mini_batch_size=2",
    "monitor.sinks.tensorboard=false",
    "monitor.screen=plain",
    "stop.iterations=1",
)


# In the place of the pretrained one.
TINY = (
    "model.name=tiny",
    "model.dtype=float32",
    "model.float32_logits=false",
    "algorithm.filter_loss_scaling=none",
)


@pytest.mark.parametrize(
    "name",
    [
        "coding_llm",
        "desk_llm",
        "game_2048",
        "house",
        "rubiks_cube",
        "search_qa_llm",
        "self_play",
        "tic_tac_toe",
        "webshop_llm",
        "word_problems",
    ],
)
def test_a_job_takes_an_iteration(name: str, server: ServerProcess, tmp_path: Path) -> None:
    words = (*SMALL, *(TINY if name.endswith("_llm") else ()), f"environment.addresses=[{server.address}]")
    train(*words, run_dir=tmp_path / "run", base=(name,))
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert record["metrics"]["collect/failed"] == 0
    assert record["metrics"]["update/skipped"] == 0
    before, after = lines(tmp_path / "run" / "evaluations.jsonl")
    assert (before["failed"], after["failed"]) == (0, 0)
