"""Records of an update: the filter's verdicts, and each token's advantage, ratio and clipping.

A file train-<step>.update.gz is stored next to the episodes of the step. Its first line contains the verdicts, and each
following line an episode. Numbers are base64 of little-endian arrays, which take a tenth of the size of decimals.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import write_objects
from starpod.trainer.data.untrusted import open_text, read_json, read_lines

if TYPE_CHECKING:  # pages read these records without torch
    from starpod.trainer.data.batch import RolloutBatch

TRAINED, BELOW, ABOVE = 1, 2, 4
"""Bits of a token's mark: it has a weight in the loss; a lower bound stopped its gradient; an upper bound did."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a group is trained on, and why, as a sentence."""

    kept: bool
    why: str


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Record of an episode's N sampled tokens, in order."""

    advantages: NDArray[np.float16]
    ratios: NDArray[np.float16]
    """Ratios before clipping."""
    marks: NDArray[np.uint8]
    """Bits TRAINED, BELOW and ABOVE."""

    def to_json(self) -> dict[str, str]:
        return {
            "advantages": _packed(self.advantages),
            "ratios": _packed(self.ratios),
            "marks": _packed(self.marks),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, str]) -> TokenRecord:
        """Return the record from JSON values. Raises KeyError and ValueError."""
        buffers = {name: base64.b64decode(values[name]) for name in ("advantages", "ratios", "marks")}
        return cls(
            np.frombuffer(buffers["advantages"], "<f2"),
            np.frombuffer(buffers["ratios"], "<f2"),
            np.frombuffer(buffers["marks"], "u1"),
        )


def token_records(table: RolloutBatch) -> Iterator[tuple[Episode, TokenRecord]]:
    """Yield each episode of an update and the record of its tokens."""
    assert table.advantages is not None and table.ratios_BT is not None and table.marks_BT is not None
    advantages_BT, ratios_BT = (
        tensor.half().cpu().numpy() for tensor in (table.advantages.advantages_BT, table.ratios_BT)
    )
    marks_BT = table.marks_BT.byte().cpu().numpy()
    for row, (episode, count) in enumerate(zip(table.episodes, table.mask_BT.sum(1).tolist(), strict=True)):
        # Pad with zeros for the turns shared with a parent, which are trained there.
        shared = sum(len(turn.reply) for turn in episode.turns[: episode.shared])
        columns = (np.pad(column_BT[row, :count], (shared, 0)) for column_BT in (advantages_BT, ratios_BT, marks_BT))
        yield episode, TokenRecord(*columns)


def update_file(rollouts: Path) -> Path:
    """Return the path of a step's update record, next to its file of episodes."""
    return rollouts.with_name(f"{rollouts.name.partition('.')[0]}.update.gz")


def write_update(path: Path, verdicts: Mapping[int, Verdict], records: Iterable[tuple[Episode, TokenRecord]]) -> None:
    """Write the verdicts by group id, and the records of episodes that were trained on. Raises CannotWrite."""
    groups = {str(group): [verdict.kept, verdict.why] for group, verdict in verdicts.items()}
    lines = ({"group": episode.group, "member": episode.member, **tokens.to_json()} for episode, tokens in records)
    write_objects(path, itertools.chain([{"groups": groups}], lines))


def read_verdicts(path: Path | str) -> dict[int, Verdict]:
    """Return the filter's verdict on each group; empty if the file is missing or damaged."""
    try:
        first = next(_lines(path), {})
        return {int(group): Verdict(bool(kept), str(why)) for group, (kept, why) in first.get("groups", {}).items()}
    except (TypeError, ValueError, AttributeError):
        return {}


def read_tokens(path: Path | str, group: int, member: int) -> TokenRecord | None:
    """Return the update's record of an episode; None if it was not trained on, or the file is missing or damaged."""
    for line in _lines(path):
        if (line.get("group"), line.get("member")) == (group, member):
            try:
                return TokenRecord.from_json(line)
            except (KeyError, TypeError, ValueError):
                return None
    return None


def _lines(path: Path | str) -> Iterator[dict[str, Any]]:
    try:
        with open_text(path) as file:
            for line in read_lines(file):
                if isinstance(value := read_json(line), dict):
                    yield value
    except (OSError, EOFError, ValueError, zlib.error):
        return


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()
