"""Progress of a run, and the configuration of its current stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.stages import Stages
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.run.interrupts import Interrupts


@dataclass(slots=True)
class Progress:
    """Counters of a run."""

    step: int = 0
    """Number of finished iterations."""
    version: int = 0
    """Version of the policy; each update adds 1."""
    tokens: int = 0
    """Number of tokens sampled in training, including tokens that a search sampled."""
    _earlier_seconds: float = 0.0
    _start_time: float = field(default_factory=perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds of training, including those before a resumption."""
        return self._earlier_seconds + perf_counter() - self._start_time

    def restart_clock(self) -> None:
        """Set `elapsed` to 0."""
        self._earlier_seconds, self._start_time = 0.0, perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return {"step": self.step, "version": self.version, "tokens": self.tokens, "elapsed": self.elapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`."""
        self.step, self.version, self.tokens = state["step"], state["version"], state["tokens"]
        self._earlier_seconds = state["elapsed"]


class StopReason(NamedTuple):
    """The reason why a run is over."""

    text: str
    limits: tuple[str, ...] = ()
    """Keys of `stop` whose limits were reached. With higher limits the run can continue."""


class Settings:
    """The configuration of the current stage.

    Attributes:
        whole: The unchanged configuration, which applies after the last stage.
    """

    def __init__(self, config: Config) -> None:
        self.whole = config
        self.stages = Stages(config.stages)
        self._configs = config.in_stages

    @property
    def now(self) -> Config:
        """The configuration of the current stage."""
        return self._configs[self.stages.index]

    @property
    def several(self) -> bool:
        """Whether the run has stages."""
        return len(self._configs) > 1


@dataclass(frozen=True, slots=True)
class Shared:
    """Settings and services that all parts of a run share."""

    settings: Settings
    progress: Progress
    parallel: Parallel
    interrupts: Interrupts
    screen: Screen

    @property
    def config(self) -> Config:
        """The unchanged configuration."""
        return self.settings.whole
