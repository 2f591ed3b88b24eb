"""The Echo Trap: a policy repeats itself until nothing is left to learn from (RAGEN, arXiv:2504.20073).

Four signals indicate it, usually in this order: rewards within a group become equal, entropy falls, replies become
alike, and the gradient norm rises. The mean reward falls later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starpod.report.figures import show
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.objectives import CISPO, GSPO, PPO
from starpod.trainer.algorithms.sections import KeepAll
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.diagnostics.config import MonitorConfig
from starpod.trainer.diagnostics.success import SuccessTrack
from starpod.trainer.output.words import withdrawal


@dataclass(frozen=True, slots=True)
class EchoWarning:
    """A warning for the user."""

    step: int
    signal: str
    """Name of the signal; "echo_trap" for several."""
    ratio: float
    """The signal's value divided by its initial value."""
    text: str


@dataclass(frozen=True, slots=True)
class SettingsInUse:
    """The settings of a run that advice refers to: it names their values, and recommends nothing that is on."""

    lr: float = OptimizerConfig.model_fields["lr"].default
    """Learning rate of the policy in this step."""
    max_grad_norm: float = OptimizerConfig.model_fields["max_grad_norm"].default
    temperature: float = SamplingConfig.model_fields["temperature"].default
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    # Advice, as parts of a sentence.

    @property
    def lower_rate(self) -> str:
        return f"lower the learning rate (optimizer.lr is {self.lr:.3g})"

    @property
    def more_entropy(self) -> str:
        return f"raise the entropy bonus (algorithm.entropy_coefficient is {self.algorithm.entropy_coefficient:g})"

    @property
    def higher_temperature(self) -> str:
        return f"sample at a higher temperature (sampling.temperature is {self.temperature:g})"

    @property
    def fewer_groups(self) -> str:
        chosen = self.algorithm.filter
        if isinstance(chosen, KeepAll):
            return "keep fewer groups (filter by reward deviation: algorithm.filter.strategy=top_fraction)"
        noise = "not if update/signal_to_noise is below 1"
        return f"keep fewer groups (algorithm.filter.value is {chosen.value:g}; {noise})"

    @property
    def off_of_starpo_s(self) -> str:
        """Parts of StarPO-S that are off; "" if all are on."""
        algorithm = self.algorithm
        low_bound = isinstance(algorithm.loss, PPO) and _highest(algorithm.loss) < 0.28
        parts = [
            "a filter by reward deviation (algorithm.filter.strategy=top_fraction)"
            * (algorithm.filter.strategy == "none"),
            "no KL term (algorithm.kl.where=off)" * (algorithm.kl.where != "off"),
            "a higher upper clip bound (algorithm.loss.clip_high=0.28)" * low_bound,
        ]
        return _listed([part for part in parts if part], "and")


def _highest(loss: PPO | GSPO | CISPO) -> float:
    """Return the upper clip bound, the largest one if it depends on the turn."""
    return loss.clip_high if isinstance(loss.clip_high, float) else max(loss.clip_high)


def _listed(items: Sequence[str], last: str = "or") -> str:
    """Return items as `a, b, or c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, {last} {items[-1]}" if items else ""


@dataclass(frozen=True, slots=True)
class Signal:
    """One of the four signals."""

    name: str
    """Name in metrics and settings."""
    metric: str
    """Metric that is read."""
    rises: bool
    """Whether a rise is the bad direction."""
    words: str
    """Description of the signal."""
    meaning: str
    """What a warning means."""
    remedies: Callable[[SettingsInUse], list[str]]
    """Advice on it."""


def _against_echoes(use: SettingsInUse) -> list[str]:
    scale = "scale the loss by the share of groups kept (algorithm.filter_loss_scaling=linear)"
    scaling = [scale] if use.algorithm.filter_loss_scaling == "none" else []
    return [use.fewer_groups, *scaling, use.lower_rate, "sample more varied start states"]


def _against_low_entropy(use: SettingsInUse) -> list[str]:
    loss = use.algorithm.loss
    high = _highest(loss) if isinstance(loss, PPO | GSPO | CISPO) else None
    bound = [] if high is None else [f"raise the upper clip bound (algorithm.loss.clip_high is {high:g})"]
    return [use.more_entropy, *bound, use.lower_rate]


SIGNALS = (
    Signal(
        "reward_std",
        "collect/own_std_in_group",
        False,
        "reward deviation within groups",
        "the policy is echoing; members of a group act and earn alike, so they teach little",
        _against_echoes,
    ),
    Signal(
        "entropy",
        "policy/entropy",
        False,
        "entropy",
        "the policy hardly explores any more",
        _against_low_entropy,
    ),
    Signal(
        "diversity",
        "collect/response_diversity",
        False,
        "response diversity",
        "replies to one state have become alike",
        lambda use: [use.higher_temperature, use.more_entropy, "go back to an earlier checkpoint"],
    ),
    Signal(
        "grad_norm",
        "update/grad_norm",
        True,
        "gradient norm",
        "updates have become unstable",
        lambda use: [
            use.lower_rate,
            f"lower the bound on the gradient norm (optimizer.max_grad_norm is {use.max_grad_norm:g})",
            "go back to a checkpoint before the rise",
        ],
    ),
)


IDENTICAL = "collect/identical_fraction"
SURE = "this can be healthy confidence or the beginning of an Echo Trap; watch success"


@dataclass(slots=True)
class _Track:
    """State of one signal."""

    start: list[float] = field(default_factory=list)
    """First values, from which the initial value is computed."""
    latest: list[float] = field(default_factory=list)
    """Latest values after the first ones."""
    firing: bool = False
    warned: bool = False
    """Whether the user was warned since the signal began to fire."""


class EchoTrap:
    """Watcher of the four signals. It warns once when a signal fires, and withdraws the warning on recovery.

    A signal fires if the median of its last `window` values passes its bound. It may fire again after it recovered past
    the bound by the factor `release`. If the task is solved, falling signals do not warn.

    A policy that becomes confident also loses deviation and diversity: in a healthy FrozenLake run, both passed their
    bounds in step 15. While success is high or rising, falling signals therefore fire without a warning, which follows
    if success falls. While success holds at a lower level, they are reported without advice, and the gradient norm only
    warns if it is not finite. The verdict "Echo Trap" is only given if the policy once succeeded and no longer does.
    Signals that are missing from a step's metrics keep their state.

    Groups of identical replies cause a separate warning unless success holds or the task is solved, because differences
    in their returns are chance.

    success: the run's success over time. Update this track before the `EchoTrap`.
    """

    def __init__(self, config: MonitorConfig, success: SuccessTrack) -> None:
        self._config = config.echo_trap
        self._tracks = {signal.name: _Track() for signal in SIGNALS}
        self._trapped = False
        self._success = success
        self._identical = _Track()

    def update(self, step: int, metrics: Mapping[str, float], use: SettingsInUse) -> list[EchoWarning]:
        """Process the metrics of a step, and return new warnings.

        Args:
            step: Number of the step, from 1.
            metrics: Metrics of the step by name. Missing signals keep their state.
        """
        warnings = self._judge_identical(step, metrics.get(IDENTICAL), use)
        for signal in SIGNALS:
            value = metrics.get(signal.metric)
            if value is None or not self._take(signal, value):
                continue
            warning = self._judge(step, signal, use)
            if warning is not None:
                warnings.append(warning)
        verdict = self._verdict(step, use)
        return [*warnings, verdict] if verdict is not None else warnings

    @property
    def metrics(self) -> dict[str, float]:
        """Number of firing signals, and `echo_trap/<signal>_ratio`: median of the latest values / initial value."""
        ratios = {f"echo_trap/{signal.name}_ratio": self._ratio(signal.name) for signal in SIGNALS}
        values = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        return {**values, "echo_trap/signals": float(len(self._firing))}

    @property
    def _firing(self) -> list[Signal]:
        return [s for s in SIGNALS if self._tracks[s.name].firing and self._ratio(s.name) is not None]

    def _judge_identical(self, step: int, value: float | None, use: SettingsInUse) -> list[EchoWarning]:
        """Warn if in most groups with reward deviation all replies are identical."""
        if value is None:
            return []
        track, bound, success = self._identical, self._config.identical, self._success
        track.latest = [*track.latest, value][-self._config.window :]
        now = statistics.median(track.latest)
        if len(track.latest) < self._config.window:
            return []
        if track.firing:
            if now >= bound / self._config.release and not success.solved:
                return []
            track.firing = False
            reason = f"they are {show(now, 'share')} of those with reward deviation"
            return [EchoWarning(step, "identical", now, withdrawal("groups of identical replies", reason))]
        # A policy that becomes confident also repeats itself.
        if now <= bound or success.holds or success.solved:
            return []
        track.firing = True
        dropped = use.algorithm.filter.drop_identical
        drop = [] if dropped else ["leave such groups out (algorithm.filter.drop_identical=true)"]
        return [
            EchoWarning(
                step,
                "identical",
                now,
                f"groups of identical replies: in {show(now, 'share')} of those with reward deviation all members "
                "gave the same replies, so rewards differ only by chance, which teaches nothing. To do: "
                f"{_listed([*drop, use.higher_temperature, use.more_entropy])}.",
            )
        ]

    def _take(self, signal: Signal, value: float) -> bool:
        """Record a value. Return whether there are enough values to compare the latest ones with the start."""
        if not math.isfinite(value):
            if not signal.rises:
                return False
            value = math.inf  # treat a gradient norm of NaN as the largest possible spike
        track = self._tracks[signal.name]
        if len(track.start) < self._config.start_steps and math.isfinite(value):
            track.start.append(value)
            track.latest = []
            # Judge a start of zero at once, because no value can be compared with it.
            return len(track.start) == self._config.start_steps and statistics.fmean(track.start) <= 0
        track.latest = [*track.latest, value][-self._config.window :]
        return self._ratio(signal.name) is not None

    def _ratio(self, name: str) -> float | None:
        """Return the median of a metric's latest values, divided by its mean at the start.

        It is None if there are too few values or the mean at the start is not positive. Before the start is complete,
        one value that is not finite makes it infinite.
        """
        track = self._tracks[name]
        if len(track.start) < self._config.start_steps:
            return math.inf if track.latest else None
        if len(track.latest) < self._config.window:
            return None
        start = statistics.fmean(track.start)
        return statistics.median(track.latest) / start if start > 0 else None

    def _judge(self, step: int, signal: Signal, use: SettingsInUse) -> EchoWarning | None:
        track = self._tracks[signal.name]
        ratio = self._ratio(signal.name)
        if ratio is None:
            return self._without_start(step, signal, track)
        config = self._config
        bound: float = getattr(config, signal.name)
        beyond: Callable[[float], bool]
        if signal.rises:
            beyond, recovered = (lambda r: r > bound), ratio < bound / config.release
        else:
            beyond, recovered = (lambda r: r < bound), ratio > bound * config.release
        # If the task is solved, all members succeed alike, which is no trap.
        excused = self._success.solved and not signal.rises
        if track.firing and (recovered or excused):
            warned, track.firing, track.warned = track.warned, False, False
            reason = "the task is solved" if excused else f"it is at {_share(signal, ratio)} again"
            return EchoWarning(step, signal.name, ratio, withdrawal(signal.words, reason)) if warned else None
        success = self._success
        # Large updates that improve a policy are not unstable. Updates with NaN are skipped, so they still warn.
        harmless = signal.rises and success.holds and math.isfinite(ratio)
        track.firing = track.firing or (beyond(ratio) and not excused and not harmless)
        if not track.firing or track.warned or (success.healthy and not signal.rises):
            return None
        track.warned = True
        start, now, best = (show(value, "share") for value in (success.start, success.now, success.best))
        if success.holds and not signal.rises:
            course = f"rose from {start} to {now}" if success.risen else f"holds at {now}"
            text = f"{_moved(signal, ratio)} while success {course}: {SURE}."
        elif success.never and not signal.rises:
            text = (
                f"{_moved(signal, ratio)}, and success was never above {best}: the policy settles before it has "
                "learnt. To do: a longer warm start, easier start states or partial rewards."
            )
        else:
            text = f"{_moved(signal, ratio)}: {signal.meaning}. To do: {_listed(signal.remedies(use))}."
        return EchoWarning(step, signal.name, ratio, text)

    def _without_start(self, step: int, signal: Signal, track: _Track) -> EchoWarning | None:
        """Measure the initial value again, because it was 0 and ratios to it are undefined.

        Warn if the signal is reward deviation.
        """
        steps, track.start = len(track.start), []
        if signal.name != "reward_std" or track.firing:
            return None
        track.firing = track.warned = True
        return EchoWarning(
            step,
            signal.name,
            0.0,
            f"reward deviation within groups was 0 in the first {steps} steps: the environment pays no reply more than "
            "another of its group, so there is nothing to learn from but penalties and shaping. To do: warm-start the "
            "reply format, choose easier start states, or give partial rewards.",
        )

    def _verdict(self, step: int, use: SettingsInUse) -> EchoWarning | None:
        signals = self._firing
        if len(signals) < self._config.verdict:
            trapped, self._trapped = self._trapped, False
            text = withdrawal("an Echo Trap", f"fewer than {self._config.verdict} of its signals hold")
            return EchoWarning(step, "echo_trap", 1.0, text) if trapped else None
        if self._trapped or self._success.holds or self._success.never:
            return None
        parts = [(signal, self._ratio(signal.name) or 0.0) for signal in signals]
        summary = ", ".join(f"{signal.words} at {_share(signal, ratio)}" for signal, ratio in parts)
        lowest_ratio = min(ratio for _, ratio in parts)
        self._trapped = True
        changes = [f"a lower learning rate (optimizer.lr is {use.lr:.3g})", "more varied start states"]
        changes += [f"what starpo-s adds: {missing}"] if (missing := use.off_of_starpo_s) else []
        return EchoWarning(
            step,
            "echo_trap",
            lowest_ratio,
            f"Echo Trap: {len(signals)} of {len(SIGNALS)} signals at once ({summary}). From here on, the policy "
            "mostly learns to repeat itself. To do: stop, go back to the best checkpoint, and continue with "
            f"{_listed(changes)}.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        tracks = {
            name: {
                "start": track.start,
                # JSON has no infinity.
                "latest": [value if math.isfinite(value) else None for value in track.latest],
                "firing": track.firing,
                "told": track.warned,
            }
            for name, track in self._tracks.items()
        }
        return {
            "tracks": tracks,
            "trapped": self._trapped,
            "identical": {"latest": self._identical.latest, "firing": self._identical.firing},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, values in state["tracks"].items():
            latest = [math.inf if value is None else value for value in values["latest"]]
            self._tracks[name] = _Track(list(values["start"]), latest, values["firing"], values["told"])
        self._trapped = state["trapped"]
        identical = state["identical"]
        self._identical = _Track([], list(identical["latest"]), identical["firing"])


def _share(signal: Signal, ratio: float) -> str:
    return f"{ratio:.1f} times its start" if signal.rises else f"{100 * ratio:.0f} % of its start"


def _moved(signal: Signal, ratio: float) -> str:
    if math.isinf(ratio):
        return f"{signal.words} is NaN or infinite, so updates are skipped"
    return f"{signal.words} has {'risen' if signal.rises else 'fallen'} to {_share(signal, ratio)}"
