"""Warnings about settings that are valid, but with which a run can hardly learn or show what it has learnt.

The size of a collection is not judged here. Whether its gradient is mostly noise is only known from
`update/signal_to_noise`, so that advice is the run's (run/diagnosis.py).
"""

from __future__ import annotations

import math

from starpod.trainer.algorithms.objectives import UserObjective
from starpod.trainer.algorithms.sections import TopFraction
from starpod.trainer.configuration.case import Case
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.section import Contradiction
from starpod.trainer.evaluation.statistics import paired_interval
from starpod.trainer.models.config import TINY

MAX_POINTS = 10
"""An evaluation should be able to show a gain in success of this many points."""


def half_width(episodes: int) -> float:
    """Return half the 95 % interval of a gain if a quarter of the same start states change their outcome."""
    changed = round(episodes / 8)
    low, high = paired_interval([-1.0] * changed + [1.0] * changed + [0.0] * (episodes - 2 * changed))
    return (high - low) / 2


def _one_step(case: Case) -> tuple[int, int] | None:
    """Return (episodes of an update, a smaller mini-batch size) if it takes one step, so that all ratios are 1."""
    run, algorithm = case.run, case.run.algorithm
    share = algorithm.filter.value if isinstance(algorithm.filter, TopFraction) else 1.0
    episodes = (math.ceil(share * run.collect.groups - 1e-9) + run.replay.groups) * run.collect.group_size
    unknown_size = case.search != "none" or run.replay.offline or algorithm.order != "together"
    # With `bypass`, ratios refer to the policy that sampled the tokens, which may be an older one.
    older = run.replay.reuse > 1 or run.replay.groups or run.collect.max_staleness
    differs = algorithm.epochs * algorithm.steps(episodes) > 1 or (algorithm.correction.mode == "bypass" and older)
    if isinstance(algorithm.loss, UserObjective) or unknown_size or differs or episodes < 2:
        return None
    return episodes, max(1, episodes // 4)


ADVICE: tuple[Contradiction[Case], ...] = (
    Contradiction(
        ("algorithm.mini_batch_size", "algorithm.epochs", "algorithm.loss"),
        _one_step,
        "algorithm.mini_batch_size {c.run.algorithm.mini_batch_size} makes one optimiser step of the {found[0]} "
        "episodes of an update, so every ratio is 1 and the bounds of algorithm.loss {c.run.algorithm.loss.kind} limit "
        "no step: if success does not rise, set algorithm.mini_batch_size={found[1]} and a lower optimizer.lr",
    ),
    Contradiction(
        ("evaluation.episodes",),
        lambda c: (half := 100 * half_width(c.task.evaluation.episodes)) > MAX_POINTS and half,
        "{c.evaluation_key}.episodes {c.task.evaluation.episodes} cannot show a gain of less than {found:.0f} points: "
        "that is half the 95 % interval between two evaluations on the same start states, if a quarter of them change "
        "their outcome; {c.evaluation_key}.episodes=100 shows 10 points, and 400 show 5",
    ),
    Contradiction(
        ("sampling.temperature", "evaluation.temperature"),
        # A model from scratch learns so much that its gain shows at any usual temperature.
        lambda c: c.run.model.name != TINY and c.task.evaluation.temperature != c.run.sampling.temperature,
        "training samples at temperature {c.run.sampling.temperature:g} and {c.evaluation_key}.temperature is "
        "{c.task.evaluation.temperature:g}, where a gain in training may be smaller: set "
        "{c.evaluation_key}.temperature={c.run.sampling.temperature:g}, or compare results at this temperature alone",
    ),
)


def advise(config: Config) -> list[str]:
    """Return warnings about a configuration and its stages, one sentence each."""
    cases = [Case(stage, task) for stage in config.in_stages for task in stage.tasks]
    problems = ((rule, case, found) for case in cases for rule in ADVICE if (found := rule.breaks(case)))
    return list(dict.fromkeys(rule.sentence.format(c=case, found=found) for rule, case, found in problems))
