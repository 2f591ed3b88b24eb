"""Error of the turn values learnt by the scorer `q`, on lakes whose exact values can be computed.

    python -m benchmarks.training.turn_values [--steps 4000] [--fits 100] [--seeds 3]

A scripted policy walks towards the goal or at random, with equal probability. The value of a move with a given number
of turns left therefore follows from the map. Targets are means over all visits of a state and action, or over the
outcomes of a turn and of four forks of it. Both kinds use the same number of environment steps. A tiny model is fitted
to each kind of target and tested on unseen lakes. There, the model also chooses the best of four actions that the
policy samples. Values are discounted by 0.95 per turn, and episodes have at most 8 turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import origin
from starpod.environments.frozen_lake.lake import Lake, Symbols, lake_of
from starpod.environments.frozen_lake.maps import distances_to_goal, draw_map
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import build_policy
from starpod.trainer.prompts.conversation import Conversation, Template
from starpod.trainer.scorers.base import rank_correlation
from starpod.trainer.scorers.config import QConfig
from starpod.trainer.scorers.q import QScorer, turn_targets

TURNS, GAMMA, FORKS, SIZE = 8, 0.95, 4, 4


@dataclass(slots=True)
class Walk:
    """A lake with the exact values of its moves under the scripted policy."""

    lake: Lake
    success_rate: float
    towards: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        distances, ways = distances_to_goal(self.lake.map), self.lake.ways
        far = len(self.lake.tiles) + 1

        def distance(place: int) -> int:
            steps = distances[place]
            return far if steps is None else steps

        self.towards = []
        for place in range(len(self.lake.tiles)):
            minimum = min(distance(way[place][1]) for way in ways.values())
            self.towards.append([name for name, way in ways.items() if distance(way[place][1]) == minimum])

    def chances(self, place: int) -> dict[str, float]:
        """Return the policy's probability of each action in a cell."""
        good = self.towards[place]
        return {name: 0.5 / len(self.lake.ways) + (name in good) * 0.5 / len(good) for name in self.lake.ways}

    def outcomes(self, place: int, action: str) -> list[tuple[float, int]]:
        """Return the probabilities and cells to which a move may lead."""
        before, straight, after = self.lake.ways[action][place]
        side = (1 - self.success_rate) / 2
        return [(side, before), (self.success_rate, straight), (side, after)]

    def exact(self) -> dict[tuple[int, int, str], float]:
        """Return Q, the discounted probability of success, by turns left, cell and action."""
        action_values: dict[tuple[int, int, str], float] = {}
        value = [0.0] * len(self.lake.tiles)
        for turns_left in range(1, TURNS + 1):
            for place in filter(self.lake.is_open, range(len(value))):
                for action in self.lake.ways:
                    action_values[turns_left, place, action] = sum(
                        chance * (1.0 if next_cell == self.lake.goal else GAMMA * value[next_cell])
                        for chance, next_cell in self.outcomes(place, action)
                    )
            value = [
                sum(p * action_values[turns_left, place, name] for name, p in self.chances(place).items())
                if self.lake.is_open(place)
                else 0.0
                for place in range(len(value))
            ]
        return action_values

    def play(self, rng: random.Random, place: int, turns: int) -> tuple[list[tuple[int, str]], bool]:
        """Play an episode. Returns its cells and actions, and whether the goal was reached."""
        path: list[tuple[int, str]] = []
        while len(path) < turns and self.lake.is_open(place):
            names, weights = zip(*self.chances(place).items(), strict=True)
            action = rng.choices(names, weights)[0]
            path.append((place, action))
            place = self.move(rng, place, action)
        return path, place == self.lake.goal

    def move(self, rng: random.Random, place: int, action: str) -> int:
        """Sample the cell to which a move leads."""
        chances, places = zip(*self.outcomes(place, action), strict=True)
        return int(rng.choices(places, chances)[0])


@cache
def walk_of(seed: int, success_rate: float) -> Walk:
    """Return the lake of a seed."""
    lake = lake_of(draw_map(random.Random(seed), SIZE, 0.75), success_rate, 1.0, "local", Symbols())
    return Walk(lake, success_rate)


@dataclass(slots=True)
class ScoredEpisodes:
    """Episodes, exact values and targets of their turns, and the number of environment steps used."""

    episodes: list[Episode] = field(default_factory=list)
    exact: list[list[float]] = field(default_factory=list)
    targets: list[list[float]] = field(default_factory=list)
    steps: int = 0


def play(seeds: range, steps: int, success_rate: float, forked: bool, rng: random.Random) -> ScoredEpisodes:
    """Play the lakes of these seeds in turn, until the steps are used up."""
    data = ScoredEpisodes()
    while data.steps < steps:
        seed = seeds[len(data.episodes) % len(seeds)]
        walk = walk_of(seed, success_rate)
        path, success = walk.play(rng, walk.lake.start, TURNS)
        data.steps += len(path)
        exact_values = walk.exact()
        turns, values, targets = [], [], []
        for index, (place, action) in enumerate(path):
            text = walk.lake.describe(place)
            turns.append(Turn(fresh=False, observation=text, actions=[action], state_key=walk.lake.key(place)))
            values.append(exact_values[TURNS - index, place, action])
            returns = [GAMMA ** (len(path) - 1 - index) * success]
            for _ in range(FORKS if forked else 0):
                cell = walk.move(rng, place, action)
                tail, is_goal = walk.play(rng, cell, TURNS - index - 1)
                data.steps += 1 + len(tail)
                returns.append(GAMMA ** len(tail) * is_goal)
            targets.append(statistics.fmean(returns))
        data.episodes.append(Episode(len(data.episodes), 0, "lake", turns=turns, end="terminal", success=success))
        data.exact.append(values)
        data.targets.append(targets)
    if not forked:
        data.targets = turn_targets(data.episodes, GAMMA)
    return data


def write_tokens(template: Template, episodes: list[Episode]) -> None:
    """Set the token ids of prompts and replies."""
    for episode in episodes:
        conversation = Conversation(template)
        for number, turn in enumerate(episode.turns):
            prompt = conversation.ask(f"{TURNS - number}\n{turn.observation}")
            text = f"<answer>{turn.actions[0]}</answer>"
            ids = template.encode_reply(text)
            conversation.answer(ids, "stop", text)
            turn.prompt, turn.fresh, turn.reply = prompt.appended, prompt.fresh, ids
            turn.logprobs, turn.versions = [0.0] * len(ids), [0] * len(ids)


def chosen(scorer: QScorer, template: Template, seeds: range, success_rate: float, count: int) -> float:
    """Return the success rate if the policy draws `count` actions in each cell and plays the one with the highest Q."""
    rng = random.Random("chosen")
    walks = [walk_of(seed, success_rate) for seed in seeds]
    places = [walk.lake.start for walk in walks]
    pasts: list[list[Turn]] = [[] for _ in walks]
    for _ in range(TURNS):
        tries: list[tuple[int, Episode]] = []
        for number, (walk, place, past) in enumerate(zip(walks, places, pasts, strict=True)):
            if walk.lake.is_open(place):
                names, weights = zip(*walk.chances(place).items(), strict=True)
                for action in rng.choices(names, weights, k=count):
                    turn = Turn(fresh=False, observation=walk.lake.describe(place), actions=[action])
                    tries.append((number, Episode(0, 0, "lake", turns=[*past, turn])))
        write_tokens(template, [episode for _, episode in tries])
        values = (
            [row[-1] for row in scorer.score([episode for _, episode in tries])] if count > 1 else [0.0] * len(tries)
        )
        best: dict[int, tuple[float, Episode]] = {}
        for (number, episode), value in zip(tries, values, strict=True):
            if number not in best or value > best[number][0]:
                best[number] = (value, episode)
        for number, (_, episode) in best.items():
            pasts[number] = episode.turns
            places[number] = walks[number].move(rng, places[number], episode.turns[-1].actions[0])
    return statistics.fmean(place == walk.lake.goal for walk, place in zip(walks, places, strict=True))


def within_cells(scorer: QScorer, template: Template, seeds: range, success_rate: float) -> float:
    """Return the mean rank correlation of Q with the exact values of a cell's actions, for cells where these differ."""
    correlations: list[float] = []
    for walk in (walk_of(seed, success_rate) for seed in seeds):
        exact_values, actions = walk.exact(), list(walk.lake.ways)
        cells = [place for place in range(len(walk.lake.tiles)) if walk.lake.is_open(place)]
        tries = [
            Episode(0, 0, "lake", turns=[Turn(fresh=False, observation=walk.lake.describe(place), actions=[action])])
            for place in cells
            for action in actions
        ]
        write_tokens(template, tries)
        values = [row[0] for row in scorer.score(tries)]
        for number, place in enumerate(cells):
            estimates = values[len(actions) * number : len(actions) * (number + 1)]
            truths = [exact_values[TURNS, place, action] for action in actions]
            if (correlation := rank_correlation(list(zip(estimates, truths, strict=True)))) is not None:
                correlations.append(correlation)
    return statistics.fmean(correlations)


def squared(estimates: list[list[float]], exact: list[list[float]]) -> float:
    """Return the mean squared difference over turns."""
    pairs = [pair for row, truth in zip(estimates, exact, strict=True) for pair in zip(row, truth, strict=True)]
    return statistics.fmean((a - b) ** 2 for a, b in pairs)


def measure(success_rate: float, forked: bool, seed: int, steps: int, fits: int) -> dict[str, float]:
    """Play, fit the scorer, and compare it with the exact values."""
    train = play(range(1000 * seed, 1000 * seed + 400), steps, success_rate, forked, random.Random(f"train/{seed}"))
    test = play(range(900_000, 900_060), 400, success_rate, False, random.Random(f"test/{seed}"))
    names = walk_of(900_000, success_rate).lake.ways
    texts = [turn.observation for episode in train.episodes for turn in episode.turns]
    texts.append(" ".join(f"<answer>{name}</answer>" for name in names))
    policy = build_policy(ModelConfig(), texts=texts, critic="none", seed=seed)
    template = Template(policy.tokenizer, prefill="<answer>")
    write_tokens(template, train.episodes)
    write_tokens(template, test.episodes)
    scorer = QScorer(QConfig(), policy, lr=3e-3, micro_batch_tokens=8192)
    rng = random.Random(seed)
    for _ in range(fits):
        rows = rng.sample(range(len(train.episodes)), min(32, len(train.episodes)))
        scorer.fit_to([train.episodes[row] for row in rows], [train.targets[row] for row in rows])
    scores = scorer.score(test.episodes)
    mean = statistics.fmean(value for row in train.targets for value in row)
    pairs = [pair for row, truth in zip(scores, test.exact, strict=True) for pair in zip(row, truth, strict=True)]
    return {
        "episodes": len(train.episodes),
        "steps": train.steps,
        "target_error": squared(train.targets, train.exact),
        "error": squared(scores, test.exact),
        "constant": squared([[mean] * len(row) for row in test.exact], test.exact),
        "correlation": rank_correlation(pairs) or 0.0,
        "within_cells": within_cells(scorer, template, range(900_000, 900_060), success_rate),
        "success": chosen(scorer, template, range(900_000, 900_200), success_rate, 1),
        "best_of_4": chosen(scorer, template, range(900_000, 900_200), success_rate, 4),
    }


def turn_values_table(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of means over the seeds."""
    head = ["Slips", "Targets", "Episodes", "Error of targets", "Of Q", "Of a constant"]
    head += ["Rank correlation of Q", "Within a cell", "Success", "Best of 4 by Q"]
    rows = []
    for result in results:
        seeds = result["seeds"]
        means = {key: statistics.fmean(figures[key] for figures in seeds) for key in seeds[0]}
        cells = [f"{1 - result['success_rate']:.0%}", result["targets"], f"{means['episodes']:.0f}"]
        cells += [f"{means[key]:.3f}" for key in ("target_error", "error", "constant")]
        cells += [f"{means[key]:.2f}" for key in ("correlation", "within_cells")]
        rows.append([*cells, *(f"{means[key]:.0%}" for key in ("success", "best_of_4"))])
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="environment steps of the targets")
    parser.add_argument("--fits", type=int, default=100, help="optimiser steps of 32 episodes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="writes the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for success_rate in (1.0, 0.8):
        for name, forked in (("visits", False), (f"{FORKS} forks", True)):
            seeds = [
                measure(success_rate, forked, seed, arguments.steps, arguments.fits)
                for seed in range(1, arguments.seeds + 1)
            ]
            results.append({"success_rate": success_rate, "targets": name, "seeds": seeds})
    if arguments.json:
        figures = {"steps": arguments.steps, "fits": arguments.fits, **origin(), "results": results}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    head, rows = turn_values_table(results)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
