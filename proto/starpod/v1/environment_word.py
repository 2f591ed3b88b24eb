"""The word that names an environment in every command."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

TASKS = "tasks"
"""Family of the environments that a file of questions and answers makes."""
TASK_FILES = (".jsonl", ".csv", ".parquet")
"""Ends of the names of such files. A folder that the package datasets saved is one, too."""
_SAVED_DATASET = ("dataset_dict.json", "dataset_info.json")
"""Files in a folder that `save_to_disk` of the package datasets wrote."""
_SERVED = re.compile(r"(?P<addresses>(dns:///)?[^/=\s]+:\d+(,dns:///[^/=\s]+:\d+)*)(/(?P<name>[^/\s]+))?")


class WordError(ValueError):
    """A word that names no environment. The message says what to write instead."""


@functools.cache
def families() -> dict[str, EntryPoint]:
    """Return the families of other packages' environments by name. Their entry points are modules that host them."""
    return {entry.name: entry for entry in entry_points(group="starpod.hosting")}


@functools.cache
def installed_ids() -> list[str]:
    """Return the ids of the environments that installed packages register, whether or not they can be served."""
    return [entry.name for entry in entry_points(group="starpod.environments")]


@dataclass(frozen=True, slots=True)
class EnvironmentWord:
    """An environment: `NAME`, `FILE.py`, `FILE.py:CLASS`, `FAMILY:NAME`, `ADDRESS/NAME`, or all at `ADDRESS`.

    A file of tasks, such as `tasks.jsonl`, is short for `tasks:FILE`, with the file's absolute path.
    """

    text: str
    """The word itself."""
    name: str = ""
    """Id, class or name in its family; "" for all of a file or a server."""
    path: Path | None = None
    """The file, or the folder of a package."""
    family: str = ""
    addresses: str = ""
    """Addresses of its servers, with commas between them."""

    @classmethod
    def parse(cls, text: str) -> EnvironmentWord:
        """Raises WordError if the word has none of these forms, or there is no such file."""
        if served := _SERVED.fullmatch(text):
            return cls(text, served["name"] or "", addresses=served["addresses"])
        prefix, colon, name = text.partition(":")
        family = prefix.replace("-", "_")
        if colon and family in families() and family != TASKS:
            return cls(text, name, family=family)
        file, question_mark, settings = text.removeprefix(f"{TASKS}:").partition("?")
        path = Path(file)
        if path.suffix in TASK_FILES or (colon and family == TASKS) or _is_saved_dataset(path):
            name = f"{_existing(path).resolve()}{question_mark}{settings}"
            return cls(f"{TASKS}:{name}", name, family=TASKS)
        path = Path(prefix)
        if path.suffix == ".py" or ("/" in prefix and os.path.isfile(path / "__init__.py")):
            return cls(text, name, _existing(path).resolve())
        if not re.fullmatch(r"[\w-]+", text):
            raise WordError(
                f"{text!r} is no environment: write NAME (installed), FILE.py or FILE.py:CLASS, tasks.jsonl (your "
                f"questions), HOST:PORT/NAME, or FAMILY:NAME with a family of {', '.join(families())}"
            )
        return cls(text, text)

    @property
    def id(self) -> str:
        """Id of the environment, perhaps without its version; "" if the word does not contain it."""
        return "" if self.path or self.family else self.name

    @property
    def source(self) -> str:
        """The addresses, the file's name, or the word itself."""
        return self.addresses or (self.path.name if self.path else self.text)

    @property
    def serve(self) -> str:
        """The word for `starpod serve`, valid in every folder; "" if the environment is served already."""
        if self.path is None:
            return "" if self.addresses else self.text
        return f"{self.path}:{self.name}" if self.name else str(self.path)


def _is_saved_dataset(folder: Path) -> bool:
    return any(os.path.isfile(folder / file) for file in _SAVED_DATASET)


def _existing(path: Path) -> Path:
    """Return the path. Raises WordError if there is no such file or folder."""
    if os.path.isfile(path) or os.path.isdir(path):  # unlike Path's methods, these take a text of any length
        return path
    others = path.parent.glob(f"*{path.suffix}") if os.path.isdir(path.parent) else ()
    close = get_close_matches(path.name, [other.name for other in others])
    hint = f"; did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
    raise WordError(f"no such file: {path}{hint}")
