"""`starpod watch`: what a person sees of recorded episodes, with and without a terminal."""

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from starpod.trainer.commands.watch import watch
from starpod.trainer.data.episode import ActionOutcome, Episode, Turn
from starpod.trainer.data.files import write_episodes
from tests.support import ROOT


def make_turn(observation: str, actions: list[str], reward: float, *, effective: bool = True, **changes: Any) -> Turn:
    outcomes = [ActionOutcome(executed=True, valid=True, effective=effective)] * len(actions)
    filled = {"parts": {"environment": reward}, "outcomes": outcomes}
    return Turn(observation=observation, fresh=True, text="<raw>", actions=actions, **{**filled, **changes})


SOLVED = Episode(
    4,
    1,
    "frozen_lake-v1",
    "1.0.0",
    seed=12,
    turns=[
        make_turn("P_G [x]", ["Left", "Left"], 0.0, thought="[bold]the goal\x1b[2J is right[/]", effective=False),
        make_turn("P_G", [], -0.1, well_formed=False, finish="length", parts={"environment": 0.0, "format": -0.1}),
        make_turn("P_G", ["Right", "Right"], 1.0),
    ],
    end="terminal",
    success=True,
    final_observation="__√",
)
LOST = Episode(5, 0, "frozen_lake-v1", turns=[make_turn("PO", ["Right"], 0.0)], end="max_turns", success=False)
FAILED = Episode(6, 0, "frozen_lake-v1", end="failed", error="SessionLost: gone")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "episodes" / "eval-000025.jsonl"
    write_episodes(path, [SOLVED, LOST, FAILED])
    write_episodes(path.with_name("eval-000000.jsonl"), [LOST])
    write_episodes(path.with_name("train-000025.jsonl"), [LOST])
    return path


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(watch, [str(path), *arguments])


def test_an_episode_turn_by_turn(file: Path) -> None:
    result = run(file, "--episode", "1")
    assert result.exit_code == 0
    told = [
        "Episode 1 of eval-000025.jsonl: frozen_lake-v1 1.0.0, seed 12, group 4, member 1",
        "P_G [x]",  # what is in the record is no markup
        "[bold]the goal\ufffd[2J is right[/]",
        "Left || Left",
        "changed nothing",
        "<raw>",
        "ill-formed; cut off by the token limit; no action",
        "-0.1 (format -0.1)  total -0.1",
        "+1  total +0.9",
        "__√",
        "Solved: the task ended after 3 turns, total reward +0.9",
    ]
    assert [text for text in told if text not in result.stdout] == []
    assert result.stdout.index("turn 1") < result.stdout.index("turn 2") < result.stdout.index("at the end")


@pytest.mark.parametrize(
    ("arguments", "episodes"),
    [((), [1, 2, 3]), (("--solved",), [1]), (("--failed",), [2, 3]), (("--episode", "2"), [2])],
)
def test_episodes_are_chosen(file: Path, arguments: tuple[str, ...], episodes: list[int]) -> None:
    for path in (file, file.parent.parent):  # of a run: the last evaluation
        shown = run(path, *arguments).stdout
        assert [number for number in (1, 2, 3) if f"Episode {number} of eval-000025.jsonl" in shown] == episodes
    assert ("SessionLost: gone" in shown) == (3 in episodes)


@pytest.mark.parametrize(
    ("name", "arguments", "status", "words"),
    [
        ("absent.jsonl", (), 2, "absent.jsonl does not exist"),
        ("bare", (), 2, "holds no episodes"),
        ("run", ("--episode", "9"), 2, "holds 3 episodes, not 9"),
        ("run", ("--episode", "1", "--failed"), 2, "is solved: leave --failed out to see it"),
        ("solved.jsonl", ("--failed",), 1, "none of the 1 episodes"),
        ("mixed.jsonl", ("--failed", "-e", "bandit-v1"), 1, "mixed.jsonl is failed and of bandit-v1"),
        ("mixed.jsonl", ("--episode", "1", "-e", "bandit-v1"), 2, "is of frozen_lake-v1: leave --environment out"),
        ("torn.jsonl", (), 1, "torn.jsonl:1: not JSON"),
        ("empty.jsonl", (), 1, "holds no episode"),
        ("solved.jsonl", ("--trees",), 1, "no episode of"),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_cannot_be_shown_is_said(
    tmp_path: Path, name: str, arguments: tuple[str, ...], status: int, words: str
) -> None:
    (tmp_path / "torn.jsonl").write_text('{"turns": ')
    (tmp_path / "empty.jsonl").write_text("")
    write_episodes(tmp_path / "solved.jsonl", [SOLVED])
    write_episodes(tmp_path / "mixed.jsonl", [LOST, replace(SOLVED, environment="bandit-v1")])
    (tmp_path / "bare").mkdir()
    result = run(tmp_path / name, *arguments)
    assert result.exit_code == status
    assert words in " ".join(result.output.split())


def test_of_an_evaluation_the_last_try_of_each_attempt_of_all_models_is_shown(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("{}")
    retried = [replace(FAILED, model="a"), replace(LOST, model="a", seed=2), replace(LOST, model="a")]
    write_episodes(tmp_path / "episodes" / "a-1.jsonl", retried)
    write_episodes(tmp_path / "episodes" / "b-2.jsonl", [replace(SOLVED, model="b")])
    result = run(tmp_path)
    titles = [line.partition(":")[0] for line in result.stdout.splitlines() if line.startswith("Episode")]
    assert titles == [
        f"Episode {place}" for place in ("1 by a of a-1.jsonl", "2 by a of a-1.jsonl", "3 by b of b-2.jsonl")
    ]
    assert "SessionLost" not in result.stdout


def test_on_a_terminal_it_takes_its_time_and_colour(file: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "starpod.cli.main", "watch", str(file), "--episode", "1", "--speed", "100"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, env=environment
    ) as process:
        os.close(terminal)
        shown = ""
        while "Solved" not in shown:
            shown += os.read(controller, 65536).decode(errors="replace")
        assert process.wait(120) == 0
    os.close(controller)
    assert "\x1b[" in shown


def test_a_branch_says_where_it_left_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "train-000001.jsonl"
    branch = Episode(5, 3, "frozen_lake-v1", turns=SOLVED.turns, end="terminal", parent=(1, 2))
    write_episodes(path, [SOLVED, branch])
    shown = run(path).output
    assert shown.count("A branch of member") == 1
    assert "A branch of member 1: up to turn 2 their turns are the same." in shown


def test_trees_of_the_groups_that_were_collected_last(tmp_path: Path) -> None:
    """Members that nobody branched, a branch of a branch, and a lost one."""
    turns = LOST.turns * 3
    members = [
        Episode(5, 0, "frozen_lake-v1", turns=turns, end="max_turns", success=False),
        Episode(5, 1, "frozen_lake-v1", turns=turns[:1], end="terminal", success=True),
        Episode(5, 4, "frozen_lake-v1", turns=turns, parent=(0, 2), end="terminal", success=True),
        Episode(5, 5, "frozen_lake-v1", end="failed", parent=(0, 2), error="gone"),
        Episode(5, 6, "frozen_lake-v1", turns=turns[:2], parent=(4, 1), end="max_turns", success=False),
    ]
    run_dir = tmp_path / "run"
    write_episodes(run_dir / "episodes" / "train-000001.jsonl.gz", [LOST])
    write_episodes(run_dir / "episodes" / "train-000002.jsonl.gz", [*members, SOLVED])
    write_episodes(run_dir / "episodes" / "final-000002.jsonl", [SOLVED])
    result = run(run_dir, "--trees")
    assert result.exit_code == 0
    assert [line.strip(" │├└─") for line in result.output.splitlines()] == [
        "group 5: 2 of 5 solved",
        "member 0: not solved, 3 turns, reward +0",
        "before turn 3",
        "member 4: solved, 3 turns, reward +0",
        "before turn 2",
        "member 6: not solved, 2 turns, reward +0",
        "member 5: failed, 0 turns, reward +0",
        "member 1: solved, 1 turn, reward +0",
    ]
