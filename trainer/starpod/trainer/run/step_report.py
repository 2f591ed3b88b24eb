"""The report of a step: its metrics, warnings and time, on the screen and in the sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from starpod.trainer.checkpoints.checkpoint import Checkpoints
from starpod.trainer.configuration.config import Config
from starpod.trainer.diagnostics.echo_trap import SettingsInUse
from starpod.trainer.diagnostics.monitor import Monitor
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.output.sinks import Sinks
from starpod.trainer.run.progress import Shared
from starpod.v1.spelling import nearest

_MEASURED = 5
"""Number of first iterations whose speed is extrapolated to the time limit."""


@dataclass(slots=True)
class Output:
    """Files and screen of a run."""

    folder: RunFolder
    checkpoints: Checkpoints
    screen: Screen
    sinks: Sinks | None = None
    """Sinks of metrics; None on ranks that write no metrics."""


class StepReport:
    """Collects the metrics of a step and reports them when it is over.

    Attributes:
        metrics: Metrics of the current step.
        monitor: Detects signs of trouble in the metrics.
    """

    def __init__(self, shared: Shared, output: Output) -> None:
        self.metrics: dict[str, float] = {}
        self.monitor = Monitor(shared.config.monitor)
        self._shared = shared
        self._output = output
        self._start_time = perf_counter()

    def begin(self) -> None:
        self._shared.screen.at = self._shared.progress.step
        self.metrics = {}
        self._start_time = perf_counter()

    def finish(self, begin_stage: Callable[[], None]) -> None:
        """Compute warnings and times, and report the step. begin_stage: called if the next stage begins."""
        metrics, step, screen = self.metrics, self._shared.progress.step, self._shared.screen
        metrics["policy/version"] = float(self._shared.progress.version)
        settings = _settings_in_use(self._shared.settings.now, step)
        warnings = [warning.text for warning in self.monitor.update(step, metrics, settings)]
        for warning in warnings:
            screen.warn(warning)
        metrics |= self.monitor.echo_trap.metrics
        if self._shared.settings.several:
            self._follow_stages(begin_stage)
        seconds = metrics["time/step"] = perf_counter() - self._start_time
        inside_seconds = metrics.get("time/generate_wait", 0.0) + metrics.get("time/update", 0.0)
        metrics["time/share_outside"] = max(0.0, 1 - inside_seconds / seconds)
        if self._output.sinks is not None:
            self._output.sinks.write(step, metrics, warnings)
        screen.step(step, self._shared.settings.now.stop.iterations, metrics)
        self._forecast()

    def _follow_stages(self, begin_stage: Callable[[], None]) -> None:
        """Record the stage in the metrics, and begin the next one if its condition is met."""
        stages, metrics, screen = self._shared.settings.stages, self.metrics, self._shared.screen
        metrics["collect/stage"] = float(stages.index)
        if metric := stages.unknown(metrics):
            screen.warn(
                f"stages[{stages.index}] waits for the metric {metric}, but this iteration has no such "
                f"metric{nearest(metric, sorted(metrics))}"
            )
        if stages.update(self._shared.progress.step, metrics):
            begin_stage()
            screen.phase(f"stage {stages.index} of {len(self._shared.config.stages)} begins")

    def _forecast(self) -> None:
        """Show, after the first steps, how many iterations fit into the time limit."""
        stop, progress = self._shared.settings.now.stop, self._shared.progress
        if progress.step == _MEASURED and stop.minutes is not None:
            count = min(stop.iterations, round(60 * stop.minutes / progress.elapsed * _MEASURED))
            self._shared.screen.phase(f"at this speed, stop.minutes={stop.minutes:g} has room for {count} iterations")


def _settings_in_use(config: Config, step: int) -> SettingsInUse:
    """Return the settings that warnings recommend to change, as they are at a step."""
    lr = config.optimizer.lr * config.optimizer.rate_factor(step, config.stop.iterations)
    return SettingsInUse(lr, config.optimizer.max_grad_norm, config.sampling.temperature, config.algorithm)
