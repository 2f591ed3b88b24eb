"""A tiny policy plays, and another one that sees the game in another form learns from it."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from starpod.trainer.data.episode import Episode
from tests.support import ServerProcess
from tests.training import Screen, interrupt, saved, train

RULES = ("environment.options.success_rate=1", "environment.options.frozen_probability=0.8")


@pytest.fixture(scope="module")
def scout(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that solves some lakes and not others."""
    folder = tmp_path_factory.mktemp("scout") / "run"
    words = ("warm_start.steps=60", "warm_start.episodes=80", "warm_start.noise=0.2", "stop.iterations=0")
    train(*RULES, *words, f"environment.addresses=[{server.address}]", run_dir=folder)
    return folder


def test_a_policy_imitates_what_a_scout_solved(scout: Path, server: ServerProcess, tmp_path: Path) -> None:
    """A run that was stopped during imitation continues without the scout."""
    folder, copy = tmp_path / "run", tmp_path / "scout"
    shutil.copytree(scout, copy)
    words = (*RULES, f"environment.addresses=[{server.address}]", "environment.options.observation=grid")
    words += (f"warm_start.from={copy}", "warm_start.thought=go {action}", "warm_start.episodes=60")
    screen = Screen("imitation 10/20", interrupt(signal.SIGINT))
    train(*words, "stop.iterations=1", run_dir=folder, status=130, screen=screen)
    played = [Episode.from_json(item) for item in saved(folder)["warm_start"]["demonstrations"]]
    assert 0 < len(played) < 60 and all(episode.success and episode.seed >= 2**40 for episode in played)
    turns = [turn for episode in played for turn in episode.turns]
    assert all("\n" in turn.observation for turn in turns), "the learner's form of the lake, not the scout's"
    assert all(f"go {turn.actions[0]}" in turn.text for turn in turns)
    assert {turn.weight for turn in turns} == {0.0, 1.0}, "random moves are not imitated"
    shutil.rmtree(copy)
    told = train(run_dir=folder, resume=True, base=())
    assert f"imitating {len(played)} demonstrations for " in told
    # Mistakes are imitated by the share that is asked for.
    words = (*words[:4], words[5], f"warm_start.from={scout}", "warm_start.failures=1", "stop.iterations=0")
    told = train(*words, run_dir=tmp_path / "all")
    assert "imitating 40 demonstrations" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["environment.id=bandit-v1", "environment.options={}"], "plays frozen_lake-v1, and not bandit-v1: name a run"),
        (
            ["seeds.final={start: 20000, stop: 20010}", "seeds.train={start: 30000, stop: 90000}"],
            r"was trained on seeds 10000 to \d+, of which seeds.final holds out 20000: choose other seeds.final",
        ),
        (["warm_start.steps=0"], "warm_start.from needs warm_start.steps, which is 0"),
    ],
)
def test_a_scout_that_cannot_serve_is_refused_without_a_server(
    words: list[str], told: str, scout: Path, tmp_path: Path
) -> None:
    errors = train(*words, f"warm_start.from={scout}", "--dry-run", run_dir=tmp_path / "run", status=2)
    assert re.search(told, errors)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["environment.options.size=3"],
            r"the same \d+ moves have different results. Options that differ: size \(not set",
        ),
        (["environment.options.success_rate=0.5"], r"success_rate \(1 there, 0.5 here\)"),
        (["environment.max_actions=5"], "its environment.max_actions is 8, and here it is 5"),
    ],
)
def test_a_scout_with_other_rules_is_refused_before_anything_is_played(
    words: list[str], told: str, scout: Path, server: ServerProcess, tmp_path: Path
) -> None:
    given = (*RULES, *words, f"environment.addresses=[{server.address}]", f"warm_start.from={scout}")
    errors = train(*given, run_dir=tmp_path / "run", status=2)
    assert re.search(told, errors) and "collecting" not in errors
