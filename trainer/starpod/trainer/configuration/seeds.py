"""Seeds of start states for each purpose, and seeds of random streams.

Training, warm start, selection and final evaluation use ranges of start states that do not overlap. No evaluation
contains trained start states, and the final one contains none that were used to choose its checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import ConfigError, Section

RUN_STRIDE = 1_000_000
"""Distance between the first training seeds of runs whose `seed` differs by one."""
Purpose = Literal["selection", "final"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
"""Purposes of evaluations."""


def members_luck(seed: int, group: int, members: Iterable[int]) -> list[int]:
    """Return the dynamics seeds of members of a group that begin in one state. Those of another group differ."""
    return [derive(seed, "luck", group, member) for member in members]


def derive(seed: int, *names: str | int) -> int:
    """Return a seed below 2**63 for the stream `names` of the run `seed`. It is the same on every machine.

    Different arguments give independent streams. ("a", "b") differs from ("ab",), and 1 differs from "1".
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        word = f"{'i' if isinstance(name, int) else 's'}{name}".encode()
        digest.update(len(word).to_bytes(4, "little") + word)
    return int.from_bytes(digest.digest(), "little") >> 1


class SeedRange(Section):
    """Seeds from `start` up to but not including `stop`."""

    start: int = Field(ge=0, lt=2**64, description="The first seed.")
    stop: int = Field(ge=1, le=2**64, description="The seed after the last one.")

    @model_validator(mode="after")
    def _not_empty(self) -> SeedRange:
        if self.stop <= self.start:
            raise ValueError(f"a range of seeds must not be empty: {self.start} to {self.stop} is")
        return self

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, seed: int) -> bool:
        return self.start <= seed < self.stop


class SeedsConfig(Section):
    """Ranges of start states. Overlapping ranges are refused."""

    final: SeedRange = Field(
        default=SeedRange(start=0, stop=5_000),
        description="Start states of the final evaluation and of `starpod eval`.",
    )
    selection: SeedRange = Field(
        default=SeedRange(start=5_000, stop=10_000),
        description="Start states of evaluations during training, which choose the best checkpoint.",
    )
    train: SeedRange = Field(default=SeedRange(start=10_000, stop=2**40), description="Start states of training.")
    warmstart: SeedRange = Field(
        default=SeedRange(start=2**40, stop=2**41), description="Start states of demonstrations for the warm start."
    )

    @model_validator(mode="after")
    def _disjoint(self) -> SeedsConfig:
        ranges: list[tuple[str, SeedRange]] = sorted(self, key=lambda item: item[1].start)
        for (name, low), (other, high) in itertools.pairwise(ranges):
            if low.stop > high.start:
                raise ValueError(
                    f"seeds.{name} ({low.start} to {low.stop}) and seeds.{other} ({high.start} to {high.stop}) "
                    f"overlap from {high.start} on: evaluation seeds must not be used to train or to select"
                )
        return self

    def holds_out(self, seed: int) -> str:
        """Return the range of an evaluation that contains a seed, in words; "" if none does."""
        ranges = ((purpose, getattr(self, purpose)) for purpose in PURPOSES)
        return next((f"seeds.{name} ({span.start} to {span.stop - 1})" for name, span in ranges if seed in span), "")

    def held_out(self, purpose: Purpose, count: int) -> range:
        """Return the first `count` seeds of a purpose, the same at every call. Raises ValueError if there are fewer."""
        seeds: SeedRange = getattr(self, purpose)
        if count > len(seeds):
            raise ValueError(f"seeds.{purpose} holds {len(seeds)} seeds, fewer than the {count} episodes to evaluate")
        return range(seeds.start, seeds.start + count)


class SeedCursor:
    """Cursor over the seeds of a range. After the last seed it begins again.

    Attributes:
        taken: Number of seeds handed out so far, which is the index of the next seed.

    run_seed: determines the first seed, `start + run_seed * RUN_STRIDE`, which wraps around at the end of the range.
    Runs with different values of `run_seed` therefore play different start states.
    """

    def __init__(self, seeds: SeedRange, run_seed: int = 0) -> None:
        self._seeds = seeds
        self._run_seed = run_seed
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """Return the next `count` seeds."""
        first = self._run_seed * RUN_STRIDE + self.taken
        self.taken += count
        return [self._seeds.start + index % len(self._seeds) for index in range(first, first + count)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"range": self._seeds.to_dict(), "run_seed": self._run_seed, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`. Raises ConfigError if the range or the run's seed differs."""
        facts = {**self.state_dict(), "taken": state["taken"]}
        if facts != dict(state):
            raise ConfigError(
                f"the checkpoint took its seeds from {state['range']} of run seed {state['run_seed']}, "
                f"this run takes them from {facts['range']} of run seed {facts['run_seed']}: resume with the same seeds"
            )
        self.taken = int(state["taken"])
