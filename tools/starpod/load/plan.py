"""What a run does: who is driven, how, and in which stages. Plain values that travel to the generator processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starpod.client.transport import Transport
from starpod.load.schedule import Arrivals, Think

Wire = Literal["stream", "unary", "openenv"]
PolicyKind = Literal["random", "expert", "recorded"]
EXTRAS = ("render", "fork", "snapshot", "renew")
"""Calls that --mix may ask for besides steps."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server. address: host:port, or a URL. server_name: whom a resolved address stands for."""

    address: str
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Turns:
    """What the agents do.

    kind: random: `actions` where there are any, else the observation's valid ones; expert: the environment's advice.
    actions: text, or JSON objects for an OpenEnv server. episodes: of a recording.
    """

    kind: PolicyKind = "random"
    actions: tuple[str, ...] = ()
    episodes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays the same in all stages of a run.

    wire: how calls travel. columns: steps of text go in columns.
    mix: besides steps, calls of this kind per step. episodes_per_session: a new session after so many; 0: never.
    timeout: seconds after which a call counts as a missed deadline and is asked again.
    retry_overload: wait as RetryInfo says and send the call again, instead of dropping it.
    record: keep what is played.
    """

    places: tuple[Place, ...]
    transport: Transport
    wire: Wire
    environment_id: str = ""
    version: str = ""
    options: Mapping[str, Any] | None = None
    columns: bool = False
    turns: Turns = field(default_factory=Turns)
    mix: Mapping[str, float] = field(default_factory=dict)
    think: Think = field(default_factory=lambda: Think("0"))
    episodes_per_session: int = 0
    seed: int = 0
    timeout: float = 30.0
    retry_overload: bool = True
    processes: int = 1
    record: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """One load, held for a while. rate: steps due per second over all generators; None: a closed loop.

    warmup: seconds before anything counts. interval: seconds between points of the curves.
    """

    name: str
    sessions: int
    seconds: float
    warmup: float
    rate: float | None = None
    arrivals: Arrivals = "poisson"

    @property
    def interval(self) -> float:
        """Fine enough for forty points, so that intervals can be drawn from; a second at most."""
        return min(max(self.seconds / 40, 0.05), 1.0)
