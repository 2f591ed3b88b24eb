"""What happens in an episode, as plain values that can be compared between instances and processes."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from starpod.env_server.environment import Environment
from starpod.env_server.episode import Episode, Limits, Want
from starpod.environments.bandit.environment import Bandit
from starpod.environments.countdown.environment import Countdown
from starpod.environments.frozen_lake.environment import FrozenLake
from starpod.environments.sokoban.environment import Sokoban
from starpod.environments.sudoku.environment import Sudoku

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
    (Sokoban, {"layout": "#####\n#P__#\n#_XO#\n#_XO#\n#___#\n#####", "observation": "coord"}),
    (Sudoku, {}),
    (Sudoku, {"size": 4, "difficulty": "hard", "conflicts": "place"}),
    (Sudoku, {"puzzle": "2.1. .1.. ..24 4.3.", "observation": "detailed"}),
]
"""Environments with options that between them use every way to start."""


def episode(case: Case, seed: int, dynamics_seed: int) -> Episode:
    """A fresh episode with limits that let it last a while."""
    kind, options = case
    environment = kind()
    environment.options = kind.Options(**options)
    started = Episode(environment, Limits(max_turns=20))
    started.reset(seed, dynamics_seed)
    return started


def next_action(state: Episode, rng: random.Random) -> Any:
    """A valid action where they can be listed, the expert's or nonsense where not."""
    valid = state.environment.valid_actions()
    if valid is not None:
        return rng.choice(list(valid))
    return rng.choice([state.environment.expert_action(), "1 + 1", "nonsense"])


def play(state: Episode, seed: int) -> list[str]:
    """Goes on to the end with actions drawn from the seed; one line for what is seen first and one for each turn."""
    rng = random.Random(seed)
    lines = [repr(state.observe(EVERYTHING))]
    while not state.end_reason:
        transition = state.turn([next_action(state, rng)], EVERYTHING)
        lines.append(repr(transition))
    lines.append(str(state.environment.render("text")))
    return lines


if __name__ == "__main__":
    seeds = range(int(sys.argv[1]))
    json.dump([play(episode(case, seed, seed + 1), seed) for case in CASES for seed in seeds], sys.stdout)
