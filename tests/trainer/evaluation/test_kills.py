"""An evaluation that is killed at random moments and called again: nothing is lost, and nothing is played twice."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from starpod.trainer.commands.eval import evaluate
from starpod.trainer.data.files import read_episodes
from tests.support import ServerProcess
from tests.tools.gateway.kills import AGENT, alike, begin_command, kill_child, save_model
from tests.tools.gateway.test_programs import TOOLS

ENVIRONMENTS = ("frozen_lake-v1", "sokoban-v1")
ATTEMPTS = 2
KILLS = int(os.environ.get("STARPOD_KILLS", "15"))
"""Kills of the long test. The page of evaluations quotes a run with 100."""


def words(server: ServerProcess, models: list[str], folder: Path, starts: int) -> list[str]:
    """The arguments of the command."""
    environments = [word for name in ENVIRONMENTS for word in ("-e", f"{server.address}/{name}")]
    counts = ("--episodes", str(starts), "--attempts", str(ATTEMPTS), "--max-tokens", "8", "--concurrency", "2")
    results = ("--to", str(folder), "--json", str(folder.with_suffix(".json")))
    return [*models, *environments, "--turns", "4", *counts, *results]


def lines_in(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("episodes/*"))


def kill_often(process: subprocess.Popen[bytes], folder: Path, kills: int, episodes: int) -> int:
    """Kill the command at random moments until it is over, a third of them while it plays. Return the number.

    A life ends at the latest when it has added its share of a quarter of the episodes. On a fast machine, the command
    would otherwise be over after a few kills.
    """
    rng, count, share = random.Random(3), 0, max(1, episodes // (4 * kills))
    while process.poll() is None:
        if count == kills:
            time.sleep(0.05)
            continue
        before, plays = lines_in(folder), rng.random() < 0.35
        end = time.monotonic() + (60.0 if plays else rng.uniform(0.0, 2.0))
        while process.poll() is None and time.monotonic() < end and lines_in(folder) < before + share:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.02))
        count += kill_child(process)
    return count


def without_times(value: Any) -> Any:
    """JSON values without what the clock says."""
    if isinstance(value, dict):
        clocks = ("generating", "stepping", "seconds_mean")
        return {key: without_times(item) for key, item in value.items() if key not in clocks}
    return [without_times(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("kills", "starts"),
    [(5, 2), pytest.param(KILLS, KILLS // 3, marks=[pytest.mark.minutes, pytest.mark.timeout(1800)])],
)
def test_an_evaluation_among_kills_equals_an_undisturbed_one(
    server: ServerProcess, tmp_path: Path, kills: int, starts: int
) -> None:
    model, program = save_model(tmp_path / "model"), tmp_path / "agent.py"
    program.write_text(TOOLS + AGENT)
    models = [str(model), f"{model} | {sys.executable} {program}", "random", "expert"]
    arguments = words(server, models, tmp_path / "killed", starts)
    number = len(models) * len(ENVIRONMENTS) * starts * ATTEMPTS
    with contextlib.ExitStack() as stack:
        process = begin_command(stack, "eval", *arguments)
        count = kill_often(process, tmp_path / "killed", kills, number)
        assert process.wait() == 0
    undisturbed = CliRunner().invoke(evaluate, words(server, models, tmp_path / "calm", starts))
    assert undisturbed.exit_code == 0, undisturbed.output
    episodes = {name: list(read_episodes(tmp_path / name)) for name in ("killed", "calm")}
    keys = {name: [(e.model, e.environment, e.seed, e.member) for e in each] for name, each in episodes.items()}
    assert len(keys["killed"]) == len(set(keys["killed"])) == number
    assert set(keys["killed"]) == set(keys["calm"])
    killed, calm = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("killed", "calm"))
    assert without_times(killed) == without_times(calm)
    calm_episodes = dict(zip(keys["calm"], episodes["calm"], strict=True))
    differing = [
        key
        for key, episode in zip(keys["killed"], episodes["killed"], strict=True)
        if not alike(without_times(episode.to_json()), without_times(calm_episodes[key].to_json()))
    ]
    print(f"{count} kills, {len(keys['killed'])} episodes, {len(differing)} differ")
    assert differing == [] and count > kills // 2
