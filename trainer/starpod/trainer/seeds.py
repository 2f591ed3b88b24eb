"""Seeds: where each purpose takes its start states from, and how one seed becomes many.

The start states of training, warm start, selection and final evaluation come from ranges that never meet: nothing is
evaluated that was trained on, and the final figure is not one that chose its checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from starpod.trainer.section import ConfigError, Section

RUN_STRIDE = 1_000_000
"""Seeds between the first training seeds of runs whose `seed` differ by one."""
Purpose = Literal["selection", "final"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
"""Of evaluations."""


def derive(seed: int, *names: str | int) -> int:
    """A seed below 2**63 for the stream called `names` of the run `seed`: the same on every machine, in every process.

    Different arguments give independent streams; ("a", "b") and ("ab",), or 1 and "1", are different.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        word = f"{'i' if isinstance(name, int) else 's'}{name}".encode()
        digest.update(len(word).to_bytes(4, "little") + word)
    return int.from_bytes(digest.digest(), "little") >> 1


class SeedRange(Section):
    """Seeds from `start` up to but not including `stop`."""

    start: int = Field(ge=0, lt=2**64, description="The first seed.")
    stop: int = Field(ge=1, le=2**64, description="The seed after the last.")

    @model_validator(mode="after")
    def _not_empty(self) -> SeedRange:
        if self.stop <= self.start:
            raise ValueError(f"a range of seeds must hold one at least: {self.start} to {self.stop} holds none")
        return self

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, seed: int) -> bool:
        return self.start <= seed < self.stop


class SeedsConfig(Section):
    """Ranges of start states. Overlapping ranges are refused.

    final: of the figure that a run ends with, and of `starpod eval`. selection: of the evaluations during training,
    which choose the best checkpoint.
    """

    final: SeedRange = SeedRange(start=0, stop=5_000)
    selection: SeedRange = SeedRange(start=5_000, stop=10_000)
    train: SeedRange = SeedRange(start=10_000, stop=2**40)
    warmstart: SeedRange = SeedRange(start=2**40, stop=2**41)

    @model_validator(mode="after")
    def _disjoint(self) -> SeedsConfig:
        ranges: list[tuple[str, SeedRange]] = sorted(self, key=lambda item: item[1].start)
        for (name, low), (other, high) in itertools.pairwise(ranges):
            if low.stop > high.start:
                raise ValueError(
                    f"seeds.{name} ({low.start} to {low.stop}) and seeds.{other} ({high.start} to {high.stop}) overlap "
                    f"from {high.start} on: what is measured must have taught and chosen nothing"
                )
        return self

    def holds_out(self, seed: int) -> str:
        """Which range of an evaluation a seed lies in, in words; empty where in none."""
        found = ((purpose, getattr(self, purpose)) for purpose in PURPOSES)
        return next((f"seeds.{name} ({own.start} to {own.stop - 1})" for name, own in found if seed in own), "")

    def held_out(self, purpose: Purpose, count: int) -> range:
        """The first `count` seeds of a purpose, the same at every call. Raises ValueError if there are fewer."""
        seeds: SeedRange = getattr(self, purpose)
        if count > len(seeds):
            raise ValueError(f"seeds.{purpose} holds {len(seeds)} seeds, fewer than the {count} episodes to evaluate")
        return range(seeds.start, seeds.start + count)


class SeedCursor:
    """Hands out the seeds of a range one after the other, each once until the range is used up; then it begins again.

    run_seed: where in the range it begins, so that runs with other seeds play other start states:
        `start + run_seed * RUN_STRIDE`, going round at the end of the range.
    taken: how many it has handed out; the index of the next one.
    """

    def __init__(self, seeds: SeedRange, run_seed: int = 0) -> None:
        self._seeds = seeds
        self._run_seed = run_seed
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """The next `count` seeds."""
        first = self._run_seed * RUN_STRIDE + self.taken
        self.taken += count
        return [self._seeds.start + index % len(self._seeds) for index in range(first, first + count)]

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"range": self._seeds.to_dict(), "run_seed": self._run_seed, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the other one stood. Raises ConfigError if that one had another range or another run's seed."""
        mine = {**self.state_dict(), "taken": state["taken"]}
        if mine != dict(state):
            raise ConfigError(
                f"the checkpoint took its seeds from {state['range']} of run seed {state['run_seed']}, "
                f"this run takes them from {mine['range']} of run seed {mine['run_seed']}: resume with the same seeds"
            )
        self.taken = int(state["taken"])
