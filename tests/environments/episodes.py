"""Opens and plays episodes without a server; what happens in them as values that processes can compare."""

import json
import random
import sys
from typing import Any

import pytest

from starpod.env_server.authoring.environment import Environment
from starpod.env_server.episodes.live_episode import Limits, LiveEpisode, TurnResult, Want
from starpod.environments.bandit import Bandit
from starpod.environments.countdown import Countdown
from starpod.environments.desk import Desk
from starpod.environments.frozen_lake import FrozenLake
from starpod.environments.game_2048 import Game2048
from starpod.environments.house import House
from starpod.environments.rubiks_cube import RubiksCube
from starpod.environments.search_qa import SearchQA
from starpod.environments.sokoban import Sokoban
from starpod.environments.sudoku import Sudoku
from starpod.environments.tic_tac_toe import TicTacToe
from starpod.environments.word_problems import WordProblems

EVERYTHING = Want(valid_actions=True, state_key=True, expert_action=True, score=True)

Case = tuple[type[Environment], dict[str, Any]]

CASES: list[Case] = [
    (Bandit, {}),
    (Bandit, {"split": "test", "low_reward": 0.15}),
    (Bandit, {"pair": ["Phoenix", "Dragon"]}),
    (FrozenLake, {}),
    (FrozenLake, {"size": 8, "frozen_probability": 0.8, "success_rate": 1 / 3, "observation": "local"}),
    (FrozenLake, {"map": ["SFF", "HFG"], "observation": "grid_coord"}),
    (Countdown, {}),
    (Countdown, {"operators": "+-*/", "min_count": 2}),
    (Countdown, {"numbers": [3, 3, 8, 8], "target": 24}),
    (Sokoban, {}),
    (Sokoban, {"rows": 8, "columns": 8, "boxes": 2, "max_solution": 6, "observation": "local"}),
    (Sokoban, {"rows": 6, "columns": 7, "boxes": 2, "search_depth": 20}),
    (Sokoban, {"boxes": 3, "min_solution": 6}),
    (Sokoban, {"layout": "#####\n#P__#\n#_XO#\n#_XO#\n#___#\n#####", "observation": "coord"}),
    (Sudoku, {}),
    (Sudoku, {"size": 4, "difficulty": "hard", "conflicts": "place"}),
    (Sudoku, {"difficulty": "hard"}),
    (Sudoku, {"size": 16}),
    (Sudoku, {"puzzle": "2.1. .1.. ..24 4.3.", "observation": "detailed"}),
    (Game2048, {}),
    (Game2048, {"size": 3, "target": 64, "end": "target", "reward": "raw", "observation": "grid"}),
    (Game2048, {"board": [[2, 4], [2, 8]], "target": 16}),
    (RubiksCube, {}),
    (RubiksCube, {"scramble_depth": 8, "min_distance": 4, "observation": "net"}),
    (RubiksCube, {"scramble": ["R", "U'", "B"], "max_steps": 5}),
    (TicTacToe, {}),
    (TicTacToe, {"opponent": "expert", "side": "O", "opening": 2, "observation": "line"}),
    (TicTacToe, {"opponent": "none", "opening": 1}),
    (WordProblems, {}),
    (WordProblems, {"mode": "steps", "distractors": 2, "max_steps": 6}),
    (SearchQA, {"min_hops": 2, "max_hops": 3}),
    (Desk, {}),
    (Desk, {"count": 3, "expert_calls": "text", "reward": "share"}),
    (Desk, {"tasks": ["cancel", "keep"]}),
    (House, {}),
    (House, {"tasks": ["heat", "look"], "split": "test", "furniture": 0, "things": 2, "max_steps": 12}),
]
"""Environments with options that between them use every way to start."""

each_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0].__name__}-{'-'.join(case[1]) or 'default'}"
)


def start(
    kind: type[Environment], seed: int = 0, dynamics_seed: int = 0, limits: Limits | None = None, **options: Any
) -> LiveEpisode:
    """A fresh episode; without limits where none are given."""
    environment = kind()
    environment.options = kind.Options(**options)
    episode = LiveEpisode(environment, limits or Limits())
    episode.reset(seed, dynamics_seed)
    return episode


def start_case(case: Case, seed: int, dynamics_seed: int) -> LiveEpisode:
    """A fresh episode of a case, with limits that let it last a while."""
    return start(case[0], seed, dynamics_seed, Limits(max_turns=20), **case[1])


def next_action(state: LiveEpisode, rng: random.Random) -> Any:
    """A valid action where they can be listed, else the expert's; sometimes nonsense."""
    valid = state.environment.valid_actions()
    if valid and rng.random() < 0.9:
        return rng.choice(list(valid))
    return rng.choice([state.environment.expert_action(), "1 + 1", "nonsense"])


def play(state: LiveEpisode, seed: int) -> list[str]:
    """Play to the end with actions drawn from the seed. Return the first observation and a line for each turn."""
    rng = random.Random(seed)
    lines = [repr(state.observe(EVERYTHING))]
    while not state.end_reason:
        transition = state.turn([next_action(state, rng)], EVERYTHING)
        lines.append(repr(transition))
    lines.append(str(state.environment.render("text")))
    return lines


def play_expertly(episode: LiveEpisode, rising: bool = True) -> list[TurnResult]:
    """Follow the expert to success, and check what an expert and a score promise in every environment.

    Args:
        episode: A new episode.
        rising: Whether no action of the expert may lower the score.
    """
    environment, transitions = episode.environment, []
    scores = [environment.score()]
    while not episode.end_reason:
        action, valid = environment.expert_action(), environment.valid_actions()
        assert valid is None or action in valid
        transitions.append(episode.turn([action], Want()))
        outcome = transitions[-1].outcomes[0]
        assert outcome is not None and outcome.valid and outcome.effective, action
        scores.append(environment.score())
    last = transitions[-1]
    assert last.terminated and last.success
    assert scores[-1] == 1 and all(0 <= score < 1 for score in scores[:-1]), scores
    assert not rising or scores == sorted(scores), scores
    assert environment.expert_action() is None
    assert last.details is None or last.details.criteria is None or all(last.details.criteria.values())
    return transitions


if __name__ == "__main__":
    json.dump([play(start_case(case, 3, 4), 3) for case in CASES], sys.stdout)
