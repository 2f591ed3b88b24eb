"""A file of questions, whose rows are checked once."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starpod.env_server import OptionsError
from starpod.v1.environment_word import WordError

from .checkers.base import AnswerChecker
from .questions import Question, TasksSettings, read_question
from .rows import BadRow, open_rows


class TaskFile:
    """The questions of a file.

    Rows are in an order that a digest of their keys determines, so seeds one after another choose different rows.

    Args:
        path: the file or folder.
        settings: settings of all rows.

    Raises:
        WordError: the file cannot be read, or one of its rows is bad. The message begins with its place.
    """

    version: str
    """Semantic version whose last number is a digest of the rows: servers of different files have different ones."""
    splits: dict[str, NDArray[np.int32]]
    """Indices of the rows of each split, and of `all`."""

    def __init__(self, path: Path, settings: TasksSettings) -> None:
        self.path, self.settings = path, settings
        self.is_answered = True
        self.checkers: dict[int, AnswerChecker] = {}
        try:
            self._rows = list(open_rows(path))
            self._load()
        except (BadRow, OSError) as error:
            raise WordError(str(error)) from error

    def _load(self) -> None:
        digests, codes, unique = array("Q"), array("h"), array("b")
        names: dict[str, int] = {}
        content = hashlib.blake2b(repr(self.settings).encode())
        for place, read in self._rows:
            try:
                row = read()
                question = read_question(row, self.settings, self.path.parent)
                codes.append(names.setdefault(str(row.get("split") or "train"), len(names)))
            except (ValueError, OverflowError) as error:
                raise BadRow(f"{place}: {error}") from None
            digests.append(_digest(question.key))
            unique.append(bool(question.id))
            self.checkers[id(question.checker)] = question.checker
            self.is_answered &= bool(question.answers)
            content.update(repr(row).encode("utf-8", "surrogatepass"))
        if not digests:
            raise BadRow(f"{self.path.name}: it has no rows")
        self.version = f"1.0.{int.from_bytes(content.digest()[:4], 'little')}"
        self._digests = np.asarray(digests, np.uint64)
        self._split(np.asarray(codes), np.asarray(unique), list(names))

    def _split(self, codes: NDArray[np.int16], unique: NDArray[np.int8], names: list[str]) -> None:
        """Set the splits. If no row names one other than `train`, those with the smallest digests are `test`.

        That is at least one row. Rows keep their splits when rows are added to a large file.
        """
        order = np.argsort(self._digests, kind="stable").astype(np.int32)
        keys, codes, unique = self._digests[order], codes[order], unique[order]
        clashes = (keys[1:] == keys[:-1]) & ((codes[1:] != codes[:-1]) | (unique[1:] > 0))
        if clashes.any():
            first, second = (self._rows[index][0] for index in sorted(order[np.argmax(clashes) :][:2]))
            raise BadRow(f"{second}: it has the id or prompt of {first}: remove one of them, or change its id")
        if names == ["train"] and self.settings.test and keys[0] != keys[-1]:
            bound = min(max(keys[0], np.uint64(self.settings.test * 2.0**64)), keys[-1] - np.uint64(1))
            codes, names = (keys <= bound).astype(np.int16), ["train", "test"]
        self.splits = {name: order[codes == code] for code, name in enumerate(names)} | {"all": order}

    def choose(self, split: str, seed: int, id: str) -> int:
        """Return the index of the row with an id, or of the row that a seed chooses. Raises OptionsError."""
        rows = np.flatnonzero(self._digests == np.uint64(_digest(id))) if id else self.splits[split]
        if not len(rows):
            raise OptionsError(f"{self.path.name} has no row with the id {id!r}")
        return int(rows[seed % len(rows)])

    def read(self, index: int) -> Question:
        """Return the question of a row. Raises ValueError and OSError if its image has changed."""
        return read_question(self._rows[index][1](), self.settings, self.path.parent)


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
