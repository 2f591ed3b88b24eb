"""A file of questions, whose rows are checked once."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

from starpod.env_server import OptionsError
from starpod.v1.environment_word import WordError

from .checkers.base import AnswerChecker
from .questions import Question, TasksSettings, read_question
from .rows import BadRow, open_rows


class TaskFile:
    """The questions of a file.

    Rows are in an order that a digest of their keys determines, so seeds one after another choose different rows.

    Raises:
        WordError: the file cannot be read, or one of its rows is bad. The message begins with its place.
    """

    version: str
    """Semantic version whose last number is a digest of the rows: servers of different files have different ones."""
    splits: dict[str, list[int]]
    """Indices of the rows of each split, and of `all`."""

    def __init__(self, path: Path, settings: TasksSettings) -> None:
        self.path, self.settings = path, settings
        self.is_answered = True
        self.checkers: dict[int, AnswerChecker] = {}
        self._digests: list[int] = []
        try:
            self._rows = list(open_rows(path))
            self._load()
        except (BadRow, OSError) as error:
            raise WordError(str(error)) from error

    def _load(self) -> None:
        splits: list[str] = []
        unique: list[bool] = []
        content = hashlib.blake2b(repr(self.settings).encode())
        for place, read in self._rows:
            try:
                row = read()
                question = read_question(row, self.settings, self.path.parent)
            except ValueError as error:
                raise BadRow(f"{place}: {error}") from None
            splits.append(str(row.get("split") or "train"))
            unique.append(bool(question.id))
            self._digests.append(_digest(question.key))
            self.checkers[id(question.checker)] = question.checker
            self.is_answered &= bool(question.answers)
            content.update(repr(row).encode("utf-8", "surrogatepass"))
        if not splits:
            raise BadRow(f"{self.path.name}: it has no rows")
        self.version = f"1.1.{int.from_bytes(content.digest()[:4], 'little')}"
        self._split(splits, unique)

    def _split(self, splits: list[str], unique: list[bool]) -> None:
        """Set the splits. If no row names one other than `train`, those with the smallest digests are `test`.

        That is at least one row. Rows keep their splits when rows are added to a large file.
        """
        digests, order = self._digests, sorted(range(len(splits)), key=self._digests.__getitem__)
        for one, other in pairwise(order):
            if digests[one] == digests[other] and (splits[one] != splits[other] or unique[other]):
                raise BadRow(
                    f"{self._rows[other][0]}: it has the id or prompt of {self._rows[one][0]}: remove one of them, or "
                    "change its id"
                )
        lowest, highest = digests[order[0]], digests[order[-1]]
        if set(splits) == {"train"} and self.settings.test and lowest != highest:
            bound = min(max(lowest, int(self.settings.test * 2**64)), highest - 1)
            splits = ["test" if digest <= bound else "train" for digest in digests]
        names = sorted(set(splits))
        self.splits = {name: [row for row in order if splits[row] == name] for name in names} | {"all": order}

    def choose(self, split: str, seed: int, id: str) -> int:
        """Return the index of the row with an id, or of the row that a seed chooses. Raises OptionsError."""
        rows = self.splits[split]
        if id:
            digest = _digest(id)
            rows = [row for row in self.splits["all"] if self._digests[row] == digest]
        if not rows:
            raise OptionsError(f"{self.path.name} has no row with the id {id!r}")
        return rows[seed % len(rows)]

    def read(self, index: int) -> Question:
        """Return the question of a row. Raises ValueError and OSError if its image has changed."""
        return read_question(self._rows[index][1](), self.settings, self.path.parent)


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
