"""The Echo Trap: a policy that repeats itself until nothing is left to learn from (RAGEN, arXiv:2504.20073).

Four signals show it, usually in this order: rewards within a group become equal, entropy falls, replies become alike,
and the gradient norm rises. The mean reward falls only later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starpod.trainer.diagnostics.config import MonitorConfig


@dataclass(frozen=True, slots=True)
class EchoWarning:
    """A warning for the user. signal: which one fired, or "echo_trap" for several; ratio: its value over its start."""

    step: int
    signal: str
    ratio: float
    text: str


@dataclass(frozen=True, slots=True)
class Signal:
    """name: in metrics and settings. metric: where it is read. rises: whether a rise is the bad direction.

    words: what it is. meaning: what its warning says. remedy: what to do.
    """

    name: str
    metric: str
    rises: bool
    words: str
    meaning: str
    remedy: str


SIGNALS = (
    Signal(
        "reward_std",
        "collect/reward_std_in_group",
        False,
        "reward deviation within groups",
        "the policy is echoing; members of a group do alike and earn alike, so they teach little",
        "keep fewer groups (filter by reward deviation) and scale the loss by their share "
        "(algorithm.filter_loss_scaling=linear), lower the learning rate, or sample more varied start states",
    ),
    Signal(
        "entropy",
        "policy/entropy",
        False,
        "entropy",
        "the policy hardly explores any more",
        "raise the entropy bonus or the upper clip bound, or lower the learning rate",
    ),
    Signal(
        "diversity",
        "collect/response_diversity",
        False,
        "response diversity",
        "replies to one state have become alike",
        "sample at a higher temperature, raise the entropy bonus, or go back to an earlier checkpoint",
    ),
    Signal(
        "grad_norm",
        "update/grad_norm",
        True,
        "gradient norm",
        "updates have become unstable",
        "lower the learning rate or the bound on the gradient norm, and go back to a checkpoint before the rise",
    ),
)


RISE = 0.05
"""Success this much above its start contradicts an Echo Trap, in which it ends up below."""
SURE = "a policy that becomes sure of what works looks like this, and so does an Echo Trap that begins; watch success"


@dataclass(slots=True)
class _Track:
    """State of one signal: values of the start until it is complete, then the latest ones; whether it fires."""

    start: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    firing: bool = False


class EchoTrap:
    """Follows the four signals and warns in words, once per onset; says when a warning no longer holds.

    A signal fires when the median of its last `window` values passes its bound, and may fire again after it came
    back past the bound by the factor `release`. Where the task is solved, falling signals do not warn. While success
    is above its start they are told as what they then are: a policy that becomes sure of what works. Signals that are
    missing from a step's metrics are left as they were.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config.echo_trap
        self._tracks = {signal.name: _Track() for signal in SIGNALS}
        self._trapped = False
        self._suspected = False
        self._successes: list[float] = []
        self._success_start: list[float] = []
        self._solved = False

    def update(self, step: int, metrics: Mapping[str, float]) -> list[EchoWarning]:
        """Takes the metrics of a step. Returns what is new to say."""
        self._take_success(metrics.get("collect/success"))
        warnings = []
        for signal in SIGNALS:
            value = metrics.get(signal.metric)
            if value is None or not self._take(signal, value):
                continue
            warning = self._judge(step, signal)
            if warning is not None:
                warnings.append(warning)
        verdict = self._verdict(step)
        return [*warnings, verdict] if verdict is not None else warnings

    @property
    def metrics(self) -> dict[str, float]:
        """`echo_trap/<signal>_ratio` (median of the latest values over the start) and how many signals fire."""
        ratios = {f"echo_trap/{signal.name}_ratio": self._ratio(signal.name) for signal in SIGNALS}
        values = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        return {**values, "echo_trap/signals": float(len(self._firing))}

    @property
    def _firing(self) -> list[Signal]:
        return [s for s in SIGNALS if self._tracks[s.name].firing and self._ratio(s.name) is not None]

    def _take_success(self, value: float | None) -> None:
        """Notes whether the task is solved. Like a signal, that ends only well past its bound."""
        if value is None:
            return
        if len(self._success_start) < self._config.start_steps:
            self._success_start.append(value)
        self._successes = [*self._successes, value][-self._config.window :]
        bound = self._config.solved
        self._solved = statistics.median(self._successes) >= (bound / self._config.release if self._solved else bound)

    def _rise(self) -> str:
        """How success rose since the start, in words; empty where it did not."""
        if len(self._success_start) < self._config.start_steps:
            return ""
        before, now = statistics.fmean(self._success_start), statistics.median(self._successes)
        return f"success rose from {before:.0%} to {now:.0%}" if now >= before + RISE else ""

    def _take(self, signal: Signal, value: float) -> bool:
        """Notes a value. True once the start is complete and there is something to compare."""
        if not math.isfinite(value):
            if not signal.rises:
                return False
            value = math.inf  # a gradient that is no number is the worst spike of all
        track = self._tracks[signal.name]
        if len(track.start) < self._config.start_steps:
            if math.isfinite(value):
                track.start.append(value)
            # A start of zero is judged at once: nothing will ever compare with it.
            return len(track.start) == self._config.start_steps and statistics.fmean(track.start) <= 0
        track.latest = [*track.latest, value][-self._config.window :]
        return len(track.latest) == self._config.window

    def _ratio(self, name: str) -> float | None:
        """None before there is something to compare, or where the start is zero."""
        track = self._tracks[name]
        if len(track.start) < self._config.start_steps or len(track.latest) < self._config.window:
            return None
        start = statistics.fmean(track.start)
        return statistics.median(track.latest) / start if start > 0 else None

    def _judge(self, step: int, signal: Signal) -> EchoWarning | None:
        track = self._tracks[signal.name]
        ratio = self._ratio(signal.name)
        if ratio is None:
            return self._without_start(step, signal, track)
        config = self._config
        bound: float = getattr(config, signal.name)
        beyond: Callable[[float], bool]
        if signal.rises:
            beyond, back = (lambda r: r > bound), ratio < bound / config.release
        else:
            beyond, back = (lambda r: r < bound), ratio > bound * config.release
        # Where the task is solved all members succeed alike, and that is no trap.
        excused = self._solved and not signal.rises
        if track.firing and (back or excused):
            track.firing = False
            why = "the task is solved" if excused else f"it is at {_share(signal, ratio)} again"
            return EchoWarning(step, signal.name, ratio, f"Withdrawn: the warning about {signal.words}; {why}.")
        if track.firing or not beyond(ratio) or excused:
            return None
        track.firing = True
        rise = "" if signal.rises else self._rise()
        if rise:
            text = f"{_moved(signal, ratio)} while {rise}: {SURE}."
        else:
            text = f"{_moved(signal, ratio)}: {signal.meaning}. To do: {signal.remedy}."
        return EchoWarning(step, signal.name, ratio, text)

    def _without_start(self, step: int, signal: Signal, track: _Track) -> EchoWarning | None:
        """Restarts the measurement: a start of zero cannot be compared with. Warns if reward deviation was zero."""
        steps, track.start = len(track.start), []
        if signal.name != "reward_std" or track.firing:
            return None
        track.firing = True
        return EchoWarning(
            step,
            signal.name,
            0.0,
            f"reward deviation within groups was 0 in the first {steps} steps: no reply earns more than another of its "
            "group, so there is nothing to learn from. To do: warm-start the reply format, choose easier start states, "
            "or give partial rewards.",
        )

    def _verdict(self, step: int) -> EchoWarning | None:
        firing = self._firing
        if len(firing) < self._config.verdict:
            told = self._trapped
            self._trapped = self._suspected = False
            text = "Withdrawn: the warning of an Echo Trap; fewer than {} of its signals hold."
            return EchoWarning(step, "echo_trap", 1.0, text.format(self._config.verdict)) if told else None
        rise = self._rise() if not any(signal.rises for signal in firing) else ""
        if self._trapped or (rise and self._suspected):
            return None
        parts = [(signal, self._ratio(signal.name) or 0.0) for signal in firing]
        found = ", ".join(f"{signal.words} at {_share(signal, ratio)}" for signal, ratio in parts)
        least = min(ratio for _, ratio in parts)
        if rise:
            self._suspected = True
            text = f"{len(firing)} of {len(SIGNALS)} signals at once ({found}) while {rise}: {SURE}."
            return EchoWarning(step, "echo_trap", least, text)
        self._trapped = True
        return EchoWarning(
            step,
            "echo_trap",
            least,
            f"Echo Trap: {len(firing)} of {len(SIGNALS)} signals at once ({found}). What is learnt from "
            "here on is mostly repetition. To do: stop, go back to the best checkpoint, and train on with a lower "
            "learning rate, more varied start states, or starpo-s if it is not on (filter by reward deviation, no KL "
            "term, clip 0.2/0.28).",
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        tracks = {
            name: {
                "start": track.start,
                # JSON has no infinity.
                "latest": [value if math.isfinite(value) else None for value in track.latest],
                "firing": track.firing,
            }
            for name, track in self._tracks.items()
        }
        return {
            "tracks": tracks,
            "trapped": self._trapped,
            "suspected": self._suspected,
            "successes": self._successes,
            "success_start": self._success_start,
            "solved": self._solved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, values in state["tracks"].items():
            latest = [math.inf if value is None else value for value in values["latest"]]
            self._tracks[name] = _Track(list(values["start"]), latest, values["firing"])
        self._trapped = state["trapped"]
        self._suspected = state["suspected"]
        self._successes = list(state["successes"])
        self._success_start = list(state["success_start"])
        self._solved = state["solved"]


def _share(signal: Signal, ratio: float) -> str:
    return f"{ratio:.1f} times its start" if signal.rises else f"{100 * ratio:.0f} % of its start"


def _moved(signal: Signal, ratio: float) -> str:
    if math.isinf(ratio):
        return f"{signal.words} is no finite number any more"
    return f"{signal.words} has {'risen' if signal.rises else 'fallen'} to {_share(signal, ratio)}"
