"""Replays recorded episodes of the original Sudoku from their puzzles."""

from __future__ import annotations

from typing import Any

import pytest

from starpod.env_server.environment import Limits
from starpod.env_server.episode import Episode, Transition, Want
from starpod.environments.sudoku import Sudoku
from tests.environments.recorded_turns import begin, records_of, replay_turns
from tests.golden import Parity, episodes_of

CHOSEN = {
    "cell-pays-once": "overwriting a cell pays what it gains over the best digit the cell held, not the whole again",
    "same-digit-again": "a digit that the cell holds already is refused as such, not as in conflict with itself",
    "every-step-counts": "the step limit ends the episode whatever the last action was, not on a legal placement only",
    "open-success-unknown": "the original says success = false while the episode is open; here nothing is said yet",
    "over-is-over": "after the end the original goes on; here a reset is due",
}

VARIANTS = ("SimpleSudoku", "MediumSudoku", "x_Sudoku4Detailed", "x_Sudoku9Simple")


def test_recorded_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    for variant in VARIANTS:
        episodes = episodes_of(variant)
        assert episodes, variant
        for record in episodes:
            replay(record, parity)
    parity.report("sudoku-v1", capsys)


def replay(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    sudoku = Sudoku()
    sudoku.options = Sudoku.Options(
        puzzle=start["initial_grid"],
        solution=start["solution_grid"],
        observation=config["render_format"],
        max_steps=config["max_steps"],
    )
    episode = Episode(sudoku, Limits())
    episode.reset(record["seed"], 0)
    parity.episodes += 1
    parity.equal(record["id"], sudoku.observe(), start["obs"])
    for number, step in enumerate(record["steps"]):
        where = f"{record['id']} step {number}"
        if episode.end_reason:
            parity.deviate("over-is-over")
            continue
        before = list(sudoku.grid)
        transition = episode.turn([step["action"]], Want())
        outcome, info = transition.outcomes[0], dict(step["info"])
        parity.steps += 1
        changed = [cell for cell, digit in enumerate(before) if digit != sudoku.grid[cell]]
        overwritten = any(before[cell] for cell in changed)
        again = "already" in (outcome.info or {}).get("error", "")
        late = sudoku.steps >= config["max_steps"] and not outcome.valid
        repeat = "same-digit-again" if again else ""
        parity.equal(f"{where} observation", transition.observation.parts, step["obs"], repeat)
        parity.equal(f"{where} reward", transition.reward, step["reward"], "cell-pays-once" if overwritten else "")
        parity.equal(f"{where} done", bool(episode.end_reason), step["done"], "every-step-counts" if late else "")
        still_open = "" if episode.end_reason else "open-success-unknown"
        parity.equal(f"{where} success", transition.success, info.pop("success"), still_open)
        parity.equal(f"{where} effective", outcome.effective, info.pop("action_is_effective"))
        parity.equal(f"{where} valid", outcome.valid, info.pop("action_is_valid"))
        parity.equal(f"{where} info", dict(outcome.info or {}), info, repeat)


def test_recorded_turns(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity({"same-digit-again": CHOSEN["same-digit-again"]})
    for record in records_of("Sudoku"):
        layout = record["layout"]
        sudoku = Sudoku()
        sudoku.options = Sudoku.Options(puzzle=layout["initial_grid"], solution=layout["solution_grid"])
        replay_turns(record, begin(sudoku, record), parity, _repeats)
    parity.report("sudoku-v1 in turns", capsys)


def _repeats(transition: Transition) -> str:
    return "same-digit-again" if " already\n" in str(transition.parts) else ""
