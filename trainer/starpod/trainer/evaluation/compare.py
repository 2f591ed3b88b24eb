"""Paired comparison of two evaluations on the same start states."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from starpod.trainer.evaluation.statistics import mcnemar, mean_interval, paired_interval
from starpod.trainer.output.run_folder import RunFolder

SETTINGS = ("version", "options", "limits")
"""Values of an environment that must be equal in both evaluations, or their episodes cannot be paired."""


class NotComparable(Exception):
    """Two evaluations cannot be paired. The message says what differs."""


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Read the final evaluation of a run's folder. Raises NotComparable if there is none."""
    final = RunFolder(folder).read_final()
    if final is None:
        raise NotComparable(f"{folder} has no final evaluation (final.json): finish the run with --resume")
    figures = final.get("environments") or {final["environment"]: final}
    first = next(iter(figures.values()))
    return {"seeds": first["seeds"], "environments": figures}


def compare_evaluations(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return metrics by environment, as JSON values. Differences are the second evaluation minus the first.

        pairs: number of episodes that both evaluations played. Episodes that failed in either are left out.
        starts: number of start states of the pairs.
        success, return_mean: [first, second], over the pairs.
        success_difference, return_difference: [difference, low, high] with the 95 % interval over start states,
            `paired_interval` for success and Student's for return. None without an interval.
        only_first, only_second: number of pairs that only the first, or only the second evaluation solved.
        p_value: McNemar's exact test. None without pairs or with several episodes per start, which are not independent.

    Raises:
        NotComparable: The seeds, environments, versions, options or limits differ.
    """
    _check(first, second)
    return {
        environment: compare_outcomes(figures["results"], second["environments"][environment]["results"], samples=1)
        for environment, figures in first["environments"].items()
    }


def _check(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    if first["seeds"] != second["seeds"]:
        spans = (f"{start} to {stop - 1}" for start, stop in (first["seeds"], second["seeds"]))
        raise NotComparable(
            f"the seeds differ: {' and '.join(spans)}. Only episodes from the same start states can be paired: "
            "evaluate both runs with starpod eval"
        )
    if first["environments"].keys() != second["environments"].keys():
        names = (", ".join(report["environments"]) for report in (first, second))
        raise NotComparable(f"the environments differ: {' and '.join(names)}")
    for environment, figures in first["environments"].items():
        for name in SETTINGS:
            left, right = figures[name], second["environments"][environment][name]
            if left != right:
                raise NotComparable(f"the {name} of {environment} differ: {json.dumps(left)} and {json.dumps(right)}")


def compare_outcomes(first: Mapping[str, Any], second: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Compare the `episode_results` of one environment, and return metrics as `compare_evaluations` describes them.

    Args:
        first, second: Columns of `episode_results`. Episodes are paired by seed and sample.
        samples: Number of episodes per start state. Only with 1 is there a p-value.
    """
    left, right = _by_episode(first), _by_episode(second)
    pairs = [key for key in left if key in right]
    only_first = sum(left[key][0] > right[key][0] for key in pairs)
    only_second = sum(right[key][0] > left[key][0] for key in pairs)
    starts: dict[int, list[tuple[int, int]]] = {}
    for key in pairs:
        starts.setdefault(key[0], []).append(key)
    figures: dict[str, Any] = {"pairs": len(pairs), "starts": len(starts)}
    figures |= {"only_first": only_first, "only_second": only_second}
    figures["p_value"] = mcnemar(only_first, only_second) if samples == 1 and pairs else None
    for index, (name, mean, interval) in enumerate(
        (("success", "success", paired_interval), ("return", "return_mean", mean_interval))
    ):
        figures[mean] = [fmean(side[key][index] for key in pairs) if pairs else None for side in (left, right)]
        differences = [fmean(right[key][index] - left[key][index] for key in keys) for keys in starts.values()]
        low, high = interval(differences)
        is_known = differences and math.isfinite(low)
        figures[f"{name}_difference"] = [fmean(differences), low, high] if is_known else None
    return figures


def _by_episode(results: Mapping[str, Any]) -> dict[tuple[int, int], tuple[float, float]]:
    """Map (seed, sample) to (1.0 if solved, return)."""
    columns = (results[name] for name in ("seed", "sample", "success", "return"))
    return {
        (seed, sample): (float(success is True), value) for seed, sample, success, value in zip(*columns, strict=True)
    }
