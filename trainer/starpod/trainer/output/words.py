"""Figures of a run in words, shared by the screen and the pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starpod.report.figures import Kind, show
from starpod.trainer.data.episode import Turn

WITHDRAWN = "Withdrawn: the warning about "


def withdrawal(subject: str, reason: str) -> str:
    """Return the text that withdraws a warning. subject: words that the warning begins with, after an optional "an"."""
    return f"{WITHDRAWN}{subject}; {reason}."


def standing_warnings(warnings: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the (step, text) warnings that were not withdrawn, without the withdrawals."""
    active_warnings: list[tuple[int, str]] = []
    for step, text in warnings:
        if not text.startswith(WITHDRAWN):
            active_warnings.append((step, text))
            continue
        subject = text.removeprefix(WITHDRAWN).partition(";")[0].removeprefix("an ")
        if warning := next((warning for warning in reversed(active_warnings) if warning[1].startswith(subject)), None):
            active_warnings.remove(warning)
    return active_warnings


def by_task(summary: Mapping[str, Any]) -> str:
    """Return `; bandit 90 %, lake 41 %` for an evaluation of several environments; "" for one."""
    environments = summary.get("environments") or {}
    results = ", ".join(f"{name} {brief(result)}" for name, result in environments.items())
    return f"; {results}" if results else ""


def missing_result(summary: Mapping[str, Any]) -> str:
    """Return why an evaluation has neither success nor return, such as `3 of 4 episodes failed`; "" if it has one."""
    if summary.get("success") is not None or summary.get("return_mean") is not None:
        return ""
    failed = summary.get("failed") or 0
    return f"{failed} of {failed + (summary.get('episodes') or 0)} episodes failed"


def figure_of(summaries: Iterable[Mapping[str, Any]]) -> tuple[str, str, Kind]:
    """Return the figure by which evaluations are judged, the name of its mean, and how it is shown.

    It is success, or return if none of them reports success.
    """
    if any(summary.get("success") is not None for summary in summaries):
        return "success", "success", "share"
    return "return", "return_mean", "number"


def brief(summary: Mapping[str, Any]) -> str:
    """Return `72 %`, the success of an evaluation, or `return 0.61` if the environment does not report success."""
    success = summary.get("success")
    return f"return {show(summary.get('return_mean'))}" if success is None else show(success, "share")


def outcome(summary: Mapping[str, Any]) -> str:
    """Return `success 72 % (66 to 77 %)`, or `return 0.61 (0.58 to 0.64)` if success is not reported."""
    if summary.get("success") is None:
        return f"return {return_with_interval(summary)}"
    return f"success {with_interval(summary)}"


def interval_of(summary: Mapping[str, Any], figure: str) -> str:
    """Return the interval of an evaluation's "success" or "return", such as `66 to 77 %`; "" if it has none."""
    low, high = summary.get(f"{figure}_low"), summary.get(f"{figure}_high")
    if low is None or high is None:
        return ""
    return f"{100 * low:.0f} to {100 * high:.0f} %" if figure == "success" else f"{show(low)} to {show(high)}"


def with_interval(summary: Mapping[str, Any]) -> str:
    """Return the success of an evaluation, such as `72 % (66 to 77 %)`."""
    interval = interval_of(summary, "success")
    return show(summary.get("success"), "share") + (f" ({interval})" if interval else "")


def return_with_interval(summary: Mapping[str, Any]) -> str:
    """Return the mean return of an evaluation, such as `0.61 (0.58 to 0.64)`."""
    interval = interval_of(summary, "return")
    return show(summary.get("return_mean")) + (f" ({interval})" if interval else "")


def final_line(final: Mapping[str, Any]) -> str:
    """Return the line of the final evaluation.

    Example: success 72 % (66 to 77 %) of 256 episodes, by the checkpoint of step 80; greedy 75 %

    If mean returns differ from success rates, each success rate is followed by the mean return.
    """
    if problem := missing_result(final):
        return f"no result, because {problem}{by_task(final)}, by the checkpoint of step {final['step']}"
    graded = is_graded(final)
    line = f"{outcome(final)} of {final['episodes']} episodes"
    line += f" ({failed} more failed)" if (failed := final.get("failed")) else ""
    line += f", return {return_with_interval(final)}" if graded else ""
    line += by_task(final)
    line += f", by the checkpoint of step {final['step']}"
    line += f"; greedy {format_success(final['greedy'], graded)}" if final.get("greedy") else ""
    return line + (
        f"; best of several replies {format_success(final['best_of'], graded)}" if final.get("best_of") else ""
    )


def evaluation_after_best(
    final: Mapping[str, Any] | None, evaluations: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the latest evaluation if the run continued after the checkpoint of the final evaluation, else None.

    A run that collapses ends far below its best checkpoint. Its final evaluation alone would hide the collapse.
    """
    if not (final and evaluations):
        return None
    best_step, last_step = final.get("step"), evaluations[-1].get("step")
    # The site reads files that others wrote, where a step may be anything.
    if isinstance(best_step, int | float) and isinstance(last_step, int | float) and last_step > best_step:
        return evaluations[-1]
    return None


def format_success(summary: Mapping[str, Any], graded: bool) -> str:
    """Return the result as `brief` does, followed by the return if graded: `75 % (0.91)`."""
    has_both = graded and summary.get("success") is not None
    return f"{brief(summary)} ({show(summary.get('return_mean'))})" if has_both else brief(summary)


def is_graded(summary: Mapping[str, Any]) -> bool:
    """Return whether the mean return differs from success. They are equal if a reward of 1 is paid for success only."""
    value, success = summary.get("return_mean"), summary.get("success")
    return value is not None and success is not None and abs(value - success) > 1e-9


def trend(values: Sequence[float]) -> str:
    """Return an arrow that compares the mean of the last fifth of the values with the rest, in standard deviations."""
    finite = [value for value in values if math.isfinite(value)]
    recent_count = max(len(finite) // 5, 2)
    if len(finite) < 2 * recent_count:
        return " "
    before, after = finite[:-recent_count], finite[-recent_count:]
    mean = sum(before) / len(before)
    spread = math.sqrt(sum((value - mean) ** 2 for value in before) / len(before))
    change = sum(after) / len(after) - mean
    if abs(change) <= max(0.5 * spread, 1e-9):
        return "→"
    return "↗" if change > 0 else "↘"


def remarks(turn: Turn) -> list[str]:
    """Return remarks on what went wrong in a turn, such as "cut off by the token limit"."""
    texts = [] if turn.well_formed else ["ill-formed"]
    texts += ["cut off by the token limit"] if turn.finish == "length" else []
    is_single = len(turn.actions) == 1
    if not turn.actions:
        texts.append("no action")
    elif turn.valid < turn.executed or not turn.valid:
        texts.append("invalid" if is_single else f"{turn.valid} of {len(turn.actions)} actions valid")
    elif turn.effective < turn.executed:
        texts.append(f"{turn.effective} of {turn.executed} had an effect" if turn.effective else "changed nothing")
    return texts
