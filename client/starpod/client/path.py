"""Paths: how the states of an episode were reached. `Fleet.reach` brings a new session into one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starpod.client.observation import Limits
from starpod.client.snapshot import Snapshot
from starpod.v1.values import Action


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of an episode; the fields are arguments of `Fleet.open`."""

    environment_id: str
    seed: int | None
    dynamics_seed: int | None
    options: Mapping[str, Any] | None = None
    limits: Limits | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class PathTurn:
    """One turn of an episode, and what is known of the state before it."""

    actions: Sequence[Action]
    """The actions of the turn; if there are none, the environment was not stepped."""
    before: str | None = None
    """Text of the observation before the turn; None if it is not known."""
    snapshot: Snapshot | None = None
    """Snapshot of the state before the turn."""


@dataclass(frozen=True, slots=True)
class Reseeding:
    """A fork that gave the episode a new dynamics seed."""

    dynamics_seed: int
    snapshot: Snapshot | None = None
    """Snapshot of the state before the fork."""


@dataclass(frozen=True, slots=True)
class EpisodePath:
    """The start of an episode and what happened since."""

    origin: Opening | Snapshot
    events: Sequence[PathTurn | Reseeding] = ()
    """Turns and reseedings, oldest first."""
    final: str | None = None
    """Text of the observation after the last turn; None if it is not known."""

    def until(self, turn: int | None) -> list[PathTurn | Reseeding]:
        """Return the events before a turn and that turn itself, or all events and a turn without actions for None.

        Raises ValueError if the path has fewer turns.
        """
        events = [*self.events, PathTurn((), self.final)]
        ends = [index for index, event in enumerate(events) if isinstance(event, PathTurn)]
        if turn is not None and not 0 <= turn < len(ends):
            raise ValueError(f"The path has {len(ends) - 1} turns: it does not reach turn {turn}.")
        return events[: ends[-1 if turn is None else turn] + 1]
