"""Monitoring of a run: its success over time, Echo Trap warnings, and reasons to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starpod.trainer.diagnostics.config import MonitorConfig
from starpod.trainer.diagnostics.early_stop import EarlyStop
from starpod.trainer.diagnostics.echo_trap import EchoTrap, EchoWarning, SettingsInUse
from starpod.trainer.diagnostics.success import SuccessTrack


class Monitor:
    """Monitor of a run's metrics."""

    def __init__(self, config: MonitorConfig) -> None:
        self.success = SuccessTrack(config.echo_trap)
        self.echo_trap = EchoTrap(config, self.success)
        self.early_stop = EarlyStop(config, self.success)

    def update(self, step: int, metrics: Mapping[str, float], use: SettingsInUse | None = None) -> list[EchoWarning]:
        """Process the metrics of a step, and return new warnings.

        Args:
            step: Number of the step, from 1.
            metrics: Metrics of the step by name. Missing ones keep their state.
            use: Settings of the step; None: the defaults.
        """
        self.success.update(metrics.get("collect/success"))
        self.early_stop.update(step, metrics)
        return self.echo_trap.update(step, metrics, use or SettingsInUse())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "success": self.success.state_dict(),
            "echo_trap": self.echo_trap.state_dict(),
            "early_stop": self.early_stop.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`."""
        self.success.load_state_dict(state["success"])
        self.echo_trap.load_state_dict(state["echo_trap"])
        self.early_stop.load_state_dict(state["early_stop"])
