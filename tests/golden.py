"""Golden records of the original programs: read where they lie, never committed."""

import gzip
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(os.environ.get("STARPOD_GOLDEN") or Path(__file__).resolve().parents[2] / "shared")


def golden(name: str, folder: str = "ragen_golden") -> list[Any]:
    """The records of `<folder>/<name>.jsonl.gz`; skips the test, with the reason, where the file is absent."""
    path = ROOT / folder / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no golden data at {path}; STARPOD_GOLDEN names the folder that holds {folder}/")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def episodes_of(variant: str) -> list[Any]:
    """The recorded episodes of a variant; those whose names start with `x_` lie together in one file."""
    if variant.startswith("x_"):
        return [record for record in golden("episodes_extra") if record["variant"] == variant]
    return golden(f"episodes_{variant}")


@dataclass
class Parity:
    """Counts what was compared, and lets pass only differences that are chosen.

    chosen: name of a deviation -> why. A difference under any other name fails at once, and so does a chosen one that
    never occurs: the list can only hold what is true.
    """

    chosen: dict[str, str]
    episodes: int = 0
    steps: int = 0
    deviations: Counter[str] = field(default_factory=Counter)

    def equal(self, what: str, ours: Any, original: Any, deviation: str = "") -> None:
        """Fails unless both are equal, or the difference is the chosen deviation of this name."""
        if ours == original:
            return
        assert deviation in self.chosen, f"{what}: ours {ours!r}, the original's {original!r}"
        self.deviations[deviation] += 1

    def deviate(self, deviation: str) -> None:
        """Notes a chosen deviation where there is nothing to compare."""
        assert deviation in self.chosen, deviation
        self.deviations[deviation] += 1

    def report(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Prints what was compared, past pytest's capture, and fails if it was nothing."""
        assert self.episodes > 0
        assert self.steps > 0
        idle = set(self.chosen) - set(self.deviations)
        assert not idle, f"chosen deviations that never occur: {sorted(idle)}"
        noted = ", ".join(f"{key} x{count}" for key, count in sorted(self.deviations.items()))
        with capsys.disabled():
            print(f"\n{name}: compared {self.episodes} episodes, {self.steps} steps; deviations: {noted or 'none'}")


class Draws(random.Random):
    """A random stream that returns recorded uniform draws in order, and nothing else."""

    def __init__(self, recorded: list[float]) -> None:
        super().__init__()
        self.left = list(recorded)

    def random(self) -> float:
        return self.left.pop(0)
