"""Paired comparison of two evaluations on the same start states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from starpod.trainer.evaluation.statistics import mcnemar, mean_interval, paired_share_interval
from starpod.trainer.output.run_folder import RunFolder

SETTINGS = ("version", "options", "limits")
"""Values of an environment that must be equal in both evaluations, or their episodes cannot be paired."""


_WORDS = {"seeds": "seeds", "samples": "attempts"}


class NotComparable(Exception):
    """Two evaluations cannot be paired. The message says what differs."""


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read a report of `starpod eval --json`, or a run folder's final evaluation, in the same form.

    Raises NotComparable if the path is neither.
    """
    if path.is_dir():
        final = RunFolder(path).read_final()
        if final is None:
            raise NotComparable(
                f"{path} has no final evaluation (final.json): finish the run with --resume, or measure it with "
                "starpod eval --json"
            )
        figures = final.get("environments") or {final["environment"]: final}
        first = next(iter(figures.values()))
        return {"seeds": first["seeds"], "samples": first["samples"], "environments": figures}
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise NotComparable(f"{path} cannot be read: {error}") from None
    models = report.get("models") if isinstance(report, dict) else None
    if not isinstance(models, dict):
        raise NotComparable(f"{path} is not a report of starpod eval --json: it has no results of single episodes")
    if len(models) != 1:
        raise NotComparable(f"{path} has {len(models)} models, which its own table compares")
    (model,) = models.values()
    return {"seeds": report["seeds"], "samples": report["attempts"], "environments": model["environments"]}


def compare_evaluations(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return metrics by environment, as JSON values. Differences are the second evaluation minus the first.

        pairs: number of episodes that both evaluations played. Episodes that failed in either are left out.
        starts: number of start states of the pairs.
        success, return_mean: [first, second], over the pairs.
        success_difference, return_difference: [difference, low, high] with the 95 % interval: Student's over the
            differences of start states, or `paired_share_interval` for success with one episode per start. None without
            an interval.
        only_first, only_second: number of pairs that only the first, or only the second evaluation solved.
        p_value: McNemar's exact test. None without pairs or with several episodes per start, which are not independent.

    Raises:
        NotComparable: The seeds, environments, versions, options or limits differ.
    """
    _check(first, second)
    return {
        environment: compare_outcomes(
            figures["results"], second["environments"][environment]["results"], first["samples"]
        )
        for environment, figures in first["environments"].items()
    }


def _check(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    for name in _WORDS:
        if first[name] != second[name]:
            both = " and ".join(_format_setting(name, each[name]) for each in (first, second))
            raise NotComparable(
                f"the {_WORDS[name]} differ: {both}. "
                "Only episodes from the same start states can be paired: evaluate both with the same --seed, "
                "--episodes and --attempts"
            )
    if first["environments"].keys() != second["environments"].keys():
        names = (", ".join(report["environments"]) for report in (first, second))
        raise NotComparable(f"the environments differ: {' and '.join(names)}")
    for environment, figures in first["environments"].items():
        for name in SETTINGS:
            left, right = figures[name], second["environments"][environment][name]
            if left != right:
                raise NotComparable(f"the {name} of {environment} differ: {json.dumps(left)} and {json.dumps(right)}")


def _format_setting(name: str, value: Any) -> str:
    return f"{value[0]} to {value[1] - 1}" if name == "seeds" else str(value)


def compare_outcomes(first: Mapping[str, Any], second: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Compare the `episode_results` of one environment, and return metrics as `compare_evaluations` describes them.

    Args:
        first, second: Columns of `episode_results`. Episodes are paired by seed and sample.
        samples: Number of episodes per start state. Only with 1 is there a p-value.
    """
    left, right = _by_episode(first), _by_episode(second)
    pairs = [key for key in left if key in right]
    starts: dict[int, list[tuple[int, int]]] = {}
    for key in pairs:
        starts.setdefault(key[0], []).append(key)
    figures: dict[str, Any] = {"pairs": len(pairs), "starts": len(starts)}
    for index, name in enumerate(("success", "return")):
        values = [fmean(outcomes[key][index] for key in pairs) if pairs else None for outcomes in (left, right)]
        differences = [fmean(right[key][index] - left[key][index] for key in keys) for keys in starts.values()]
        figures["success" if name == "success" else "return_mean"] = values
        figures[f"{name}_difference"] = (
            [fmean(differences), *mean_interval(differences)] if len(differences) > 1 else None
        )
    only_first = sum(left[key][0] > right[key][0] for key in pairs)
    only_second = sum(right[key][0] > left[key][0] for key in pairs)
    figures |= {"only_first": only_first, "only_second": only_second, "p_value": None}
    if samples == 1 and pairs:
        difference = (only_second - only_first) / len(pairs)
        low, high = paired_share_interval(only_first, only_second, len(pairs))
        figures["success_difference"] = [difference, low, high]
        figures["p_value"] = mcnemar(only_first, only_second)
    return figures


def _by_episode(results: Mapping[str, Any]) -> dict[tuple[int, int], tuple[float, float]]:
    """Map (seed, sample) to (1.0 if solved, return)."""
    columns = (results[name] for name in ("seed", "sample", "success", "return"))
    return {
        (seed, sample): (float(success is True), value) for seed, sample, success, value in zip(*columns, strict=True)
    }
