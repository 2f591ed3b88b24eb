"""Readers for the files of runs, which may be half-written, damaged or gone. Problems are reported as sentences."""

from __future__ import annotations

import contextlib
import errno
import platform
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from starpod.trainer.checkpoints.folders import list_checkpoints, marks_of
from starpod.trainer.configuration.yaml12 import load_yaml
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.untrusted import (
    MAX_LINE,
    BadData,
    open_regular,
    open_text,
    read_bytes,
    read_json,
    read_lines,
)
from starpod.trainer.evaluation.folder import PLAN
from starpod.trainer.output.pictures import read_pictures
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import missing_result

QUIET_SECONDS = 600.0
"""A run on another machine, whose lock cannot be seen, counts as running while its metrics are younger than this."""
MOST_PROBLEMS = 5
MOST_LINES = 2**18
"""Maximum number of lines of a file of episodes. A small compressed file may expand to 2^27 lines."""
_MOST_YAML = 2**20
"""Maximum size of a configuration in bytes."""
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 40, 4000
"""Maximum number of a run's tags, and maximum lengths of a tag and of the note in characters."""
DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that occur when values of damaged files are used."""
_DEPTH = 3
_FRESH_SECONDS = 10.0
"""Number of seconds for which a run's report on its sessions is valid."""
_TAIL = 2**16
"""Number of bytes to read from the end of metrics.jsonl, so that they contain its last line."""


class _Environment(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    id: str
    addresses: list[str] | None
    serve: list[str] | None
    options: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    max_turns: int | None
    max_actions_per_turn: int | None
    max_actions: int | None


class _Git(TypedDict):
    commit: str
    dirty: bool


class _End(TypedDict):
    outcome: str
    seconds: FiniteFloat
    limits: NotRequired[list[str]]


class _Machine(TypedDict, total=False):
    system: str
    cores: int | None
    gpus: list[str] | None
    python: str


_Number = FiniteFloat | None
_Section = dict[str, Any] | None
FIGURES = "success success_low success_high return_mean return_low return_high turns_mean format_rate".split()
_EVALUATION: dict[str, Any] = {
    "step": int,
    "episodes": int,
    **dict.fromkeys(FIGURES, _Number),
    "reference": dict[str, dict[str, _Number]],
    "environments": dict[str, dict[str, Any]],
}
_KINDS: dict[str, dict[str, Any]] = {
    "run.json": {
        "id": str,
        "title": str,
        "model": str,
        "time": FiniteFloat,
        "ended": _End,
        "git": _Git | None,
        "platform": _Machine,
        "packages": dict[str, str],
        "command": list[str],
        "resumed": list[Any],
        "differs_from_defaults": dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] | None,
    },
    "config.yaml": {
        "environment": _Environment | None,
        "environments": dict[str, _Environment] | None,
        **dict.fromkeys(("algorithm", "stop", "evaluation", "seeds"), _Section),
    },
    "final.json": _EVALUATION,
    "evaluations.jsonl": _EVALUATION,
    ".live.json": {"servers": list[str] | None, "sessions": list[dict[str, Any]] | None, "time": FiniteFloat},
}
_TYPES = {name: {key: TypeAdapter[Any](kind) for key, kind in kinds.items()} for name, kinds in _KINDS.items()}
"""Types of the values that pages use, by file. Other programs may have written these files."""
_EPISODE = TypeAdapter(Episode)


def _fitting(values: dict[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    """Return a file's values, without values of another type than pages expect.

    An evaluation without a step is empty.
    """
    fitting = dict(values)
    for key, adapter in _TYPES.get(name, {}).items():
        try:
            if key in fitting:
                fitting[key] = adapter.validate_python(fitting[key])
        except ValidationError:
            del fitting[key]
            if len(problems) < MOST_PROBLEMS:
                problems.append(f"{name}: {key} is not what a run writes there, and is skipped")
    return {} if _TYPES.get(name, {}).get("step") and "step" not in fitting else fitting


def find_runs(root: Path) -> dict[str, Path]:
    """Return the folders of runs and evaluations up to three levels below `root`, by their path relative to it.

    If `root` is itself a run, only this run is returned, by the folder's name.
    """
    if _is_run(root):
        return {_own_name(root): root}
    runs: dict[str, Path] = {}
    level = [root]
    for _ in range(_DEPTH):
        folders = []
        for folder in level:
            for child in _folders(folder):
                if _is_run(child):
                    runs[child.relative_to(root).as_posix()] = child
                else:
                    folders.append(child)
        level = folders
    return runs


def find_run(root: Path, path: str) -> Path | None:
    """Return the folder that `find_runs` returns for a path, without searching; None if it is gone."""
    folder = root if _is_run(root) else root / path
    return folder if _is_run(folder) and (folder is not root or path == _own_name(root)) else None


def _own_name(root: Path) -> str:
    return root.resolve().name or "run"


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", PLAN))


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith(".") and child.is_dir())
    except OSError:
        return []


def mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file; empty if the file is missing or cannot be read.

    problems: receives a sentence about a file that cannot be read.
    """
    try:
        if path.suffix == ".yaml":
            value = load_yaml(read_bytes(path, _MOST_YAML).decode())
        else:
            value = read_json(read_bytes(path, MAX_LINE))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {_reason(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no mapping")
        return {}
    return _fitting(value, path.name, problems)


def read_notes(run: Path, problems: list[str]) -> dict[str, Any]:
    """Return `tags` and `note` of a run; both are empty if it has none."""
    values = mapping(RunFolder(run).notes, problems)
    tags, note = values.get("tags"), values.get("note")
    texts = [tag for tag in tags if isinstance(tag, str) and tag.strip()] if isinstance(tags, list) else []
    return {
        "tags": list(dict.fromkeys(" ".join(tag.split())[:LONGEST_TAG] for tag in texts[:MOST_TAGS])),
        "note": note[:LONGEST_NOTE] if isinstance(note, str) else "",
    }


def shown_text(path: Path) -> str:
    """Return the text of a file; empty if the file is missing or cannot be read."""
    try:
        return read_bytes(path, _MOST_YAML).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def evaluations_of(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return a run's evaluations that have a result. problems: see `objects`."""
    return [line for line in objects(folder / "evaluations.jsonl", problems) if not missing_result(line)]


def objects(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines. An incomplete last line is skipped.

    problems: receives a sentence about each damaged line, up to MOST_PROBLEMS in all.
    """
    try:
        data = read_bytes(path, MAX_LINE)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {_reason(error)}")
        return []
    return [_fitting(value, path.name, problems) for _, value in parse_lines(data, path.name, problems)]


def parse_lines(
    data: bytes, name: str, problems: list[str], *, before: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each complete line.

    Args:
        data: bytes of the file, from the beginning of a line. An incomplete last line is skipped.
        name: name of the file in `problems`.
        problems: receives a sentence about each damaged line, up to MOST_PROBLEMS in all.
        before: number of lines of the file before `data`.
    """
    for number, line in enumerate(data.split(b"\n")[:-1], before + 1):
        if not line.strip():
            continue
        try:
            value = read_json(line)
        except BadData:
            value = None
        if isinstance(value, dict):
            yield number, value
        elif len(problems) < MOST_PROBLEMS:
            problems.append(f"{name}, line {number}, is damaged and skipped")


class BadFile(Exception):
    """Raised if a file of episodes cannot be read (any further). The message says where and why."""


def episode_lines(path: Path, start: int = 0, number: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a file of episodes, with its offset in the uncompressed text. Raises BadFile.

    Args:
        start: offset of the first line to read.
        number: number of lines before `start`.
    """
    try:
        with open_text(path) as file:
            file.seek(start)
            for line in read_lines(file):
                if number == MOST_LINES:
                    raise BadData("it has more lines than a file of episodes may have")
                number += 1
                if line.strip():
                    yield start, line
                start += len(line)
    except (OSError, EOFError, zlib.error, BadData) as error:
        raise BadFile(f"{path.name} cannot be read after line {number}: {_reason(error)}") from error


def read_episode(path: Path, start: int) -> dict[str, Any]:
    """Return the episode that starts at this offset of a file's uncompressed text. Raises BadFile."""
    try:
        with open_text(path) as file:
            file.seek(start)
            value = read_json(next(read_lines(file), b""))
    except (OSError, EOFError, zlib.error, BadData) as error:
        raise BadFile(f"{path.name} has changed or is gone: {_reason(error)}") from error
    if not isinstance(value, dict) or not isinstance(value.get("turns"), list):
        raise BadFile(f"{path.name} has changed: there is no episode at this place any more")
    return value


def load_episode(path: Path, start: int) -> Episode:
    """Return the episode that starts at this offset of a file's uncompressed text. Raises BadFile."""
    try:
        return _EPISODE.validate_python(asdict(Episode.from_json(read_episode(path, start))))
    except DAMAGED as error:
        raise BadFile(f"{path.name}: this episode is damaged: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a link"
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:200]


def checkpoints(run: Path) -> list[dict[str, Any]]:
    """Return complete checkpoints, newest first. `marks` of each may contain "best" and "latest"."""
    folder = run / "checkpoints"
    try:
        entries = list_checkpoints(folder)
    except OSError:
        return []
    marks = marks_of(folder)
    return [
        {"name": entry.name, "step": entry.step, "marks": marks.get(entry.name, []), "path": str(entry.path)}
        for entry in entries
    ]


def in_play(run: Path) -> dict[str, Any] | None:
    """Ask a run that is training to report its sessions, and return its latest report; None if there is none.

    The run answers within about a second. In the report, the key `sessions` is None if the report is older than
    _FRESH_SECONDS.
    """
    folder = RunFolder(run)
    with contextlib.suppress(OSError):  # in a read-only folder the run cannot be asked
        folder.watch_mark.touch()
    if not servers_of(run):
        return None
    info = mapping(folder.live_status, [])
    is_fresh = time.time() - float(info.get("time", 0.0)) < _FRESH_SECONDS
    return {
        "servers": info.get("servers") or [],
        "doing": str(info.get("doing") or ""),
        "sessions": info.get("sessions") if is_fresh else None,
    }


def servers_of(run: Path) -> str:
    """Return the addresses of the servers of a run that is training, joined by commas; empty if it reports none."""
    return ",".join(mapping(RunFolder(run).live_status, []).get("servers") or [])


def doing_of(run: Path) -> str:
    """Return a description of what a run is doing, such as sampling; empty if it reports nothing."""
    return str(mapping(RunFolder(run).live_status, []).get("doing") or "")


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the metrics of the newest iteration; empty if there are none."""
    try:
        with open_regular(folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = list(parse_lines(file.read(), "", []))
    except OSError:
        return {}
    metrics = lines[-1][1].get("metrics") if lines else None
    return metrics if isinstance(metrics, dict) else {}


def kept_pictures(run: Path, file: str, group: int, member: int) -> list[bytes]:
    """Return the pictures of an episode that the run drew for its report; empty if it drew none."""
    key = (file, group, member)
    return read_pictures(RunFolder(run).pictures, [key]).get(key, [])


def held_locks() -> set[int]:
    """Return the inodes of all files that a process of this machine has locked (Linux; elsewhere empty)."""
    try:
        rows = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    return {int(words[5].rpartition(":")[2]) for row in rows if len(words := row.split()) > 5 and words[1] == "FLOCK"}


def status(folder: Path, facts: dict[str, Any], locks: set[int], written: float) -> str:
    """Return "running", "ended", "stopped" (by a signal, before its end) or "interrupted".

    A run on this machine is running if its lock is held. Locks of other machines are invisible, so such a run counts as
    running while its metrics are recent.

    Args:
        facts: content of run.json.
        locks: result of `held_locks`.
        written: time of the last metrics, in seconds since the epoch.
    """
    if ended := facts.get("ended"):
        outcome = ended.get("outcome") if isinstance(ended, dict) else ""
        return "stopped" if str(outcome).startswith("stopped by ") else "ended"
    lock = folder / ".lock"
    try:
        if lock.stat().st_ino in locks:
            return "running"
        is_local = read_bytes(lock, _MOST_YAML).decode(errors="replace").endswith(f" on {platform.node()}")
    except (OSError, BadData):
        is_local = False
    return "running" if not is_local and is_recent(written) else "interrupted"


def is_recent(written: float) -> bool:
    """Return whether a run may still be running, given the time of its last metrics in seconds since the epoch."""
    return time.time() - written < QUIET_SECONDS
