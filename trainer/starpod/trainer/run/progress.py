"""How far a run has come, and the configuration that holds there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starpod.trainer.config import Config
from starpod.trainer.stages import Stages


@dataclass(slots=True)
class Progress:
    """What a run counts.

    step: iterations done. version: of the policy, one more with each update. tokens: sampled in training, those of a
    search included.
    """

    step: int = 0
    version: int = 0
    tokens: int = 0
    _earlier: float = 0.0
    _since: float = field(default_factory=perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a resumption included."""
        return self._earlier + perf_counter() - self._since

    def restart_clock(self) -> None:
        """Count seconds from now on."""
        self._earlier, self._since = 0.0, perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"step": self.step, "version": self.version, "tokens": self.tokens, "elapsed": self.elapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.step, self.version, self._earlier = state["step"], state["version"], state["elapsed"]
        self.tokens = state.get("tokens", 0)


class Settings:
    """The configuration of the present stage.

    whole: the run's own, which holds after the stages.
    """

    def __init__(self, config: Config) -> None:
        self.whole = config
        self.stages = Stages(config.stages)
        self._configs = config.in_stages

    @property
    def now(self) -> Config:
        """The configuration of the present stage."""
        return self._configs[self.stages.index]

    @property
    def several(self) -> bool:
        """Whether the run has stages."""
        return len(self._configs) > 1
