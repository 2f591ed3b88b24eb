"""Files of a run as they are found: half-written, damaged, gone. What cannot be read is told in sentences."""

from __future__ import annotations

import contextlib
import gzip
import json
import platform
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import yaml

from starpod.trainer.output.pictures import read_pictures
from starpod.trainer.output.run_folder import RunFolder

QUIET_SECONDS = 600.0
"""A run on another machine, whose lock cannot be seen, counts as running while its metrics are younger than this."""
MOST_PROBLEMS = 5
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEPTH = 3
_FRESH_SECONDS = 10.0
"""For which what a run told of its sessions holds."""
_TAIL = 2**16
"""Bytes at the end of a file of metrics, which hold the last line."""


def find_runs(root: Path) -> dict[str, Path]:
    """The folders of runs at `root` or up to three levels below it, by their path there; its own name for `root`."""
    if _is_run(root):
        return {_own_name(root): root}
    found: dict[str, Path] = {}
    level = [root]
    for _ in range(_DEPTH):
        below = []
        for folder in level:
            for child in _folders(folder):
                if _is_run(child):
                    found[child.relative_to(root).as_posix()] = child
                else:
                    below.append(child)
        level = below
    return found


def find_run(root: Path, path: str) -> Path | None:
    """The folder that `find_runs` gives for a path, without a look at all the others; None where it is gone."""
    folder = root if _is_run(root) else root / path
    return folder if _is_run(folder) and (folder is not root or path == _own_name(root)) else None


def _own_name(root: Path) -> str:
    return root.resolve().name or "run"


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists()


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith(".") and child.is_dir())
    except OSError:
        return []


def mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping; empty where there is none, or none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.load(text, Loader=_LOADER) if path.suffix == ".yaml" else json.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {' '.join(str(error).split())[:200]}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no mapping")
        return {}
    return value


def objects(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a last line without its end is left out, a damaged one is told."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    return [value for _, value in parse_lines(data, path.name, problems)]


def parse_lines(
    data: bytes, name: str, problems: list[str], *, before: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each whole line. before: lines of the file before `data`."""
    for number, line in enumerate(data.split(b"\n")[:-1], before + 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield number, value
        elif len(problems) < MOST_PROBLEMS:
            problems.append(f"{name}, line {number}, is damaged and left out")


class BadFile(Exception):
    """A file of episodes that cannot be read further; the message says from where on, and why."""


def episode_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset of each line of a file of episodes, in its uncompressed text, and the line. Raises BadFile."""
    start = number = 0
    try:
        with _open(path) as file:
            for line in file:
                number += 1
                if line.strip():
                    yield start, line
                start += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(f"{path.name} cannot be read after line {number}: {error}") from error


def read_episode(path: Path, start: int) -> dict[str, Any]:
    """The episode that starts at this place of a file's uncompressed text. Raises BadFile."""
    try:
        with _open(path) as file:
            file.seek(start)
            value = json.loads(file.readline())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadFile(f"{path.name} has changed or is gone: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("turns"), list):
        raise BadFile(f"{path.name} has changed: there is no episode at this place any more")
    return value


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Complete checkpoints, newest first, with their step and what is said of them: best, latest."""
    named: dict[str, list[str]] = {}
    for mark in ("best", "latest"):
        try:
            target = (folder / "checkpoints" / mark).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        named.setdefault(target, []).append(mark)
    try:
        found = [path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-")]
    except OSError:
        return []
    return [
        {"name": path.name, "step": int(digits), "marks": named.get(path.name, []), "path": str(path)}
        for path in sorted(found, reverse=True)
        if (digits := path.name.removeprefix("step-")).isdecimal()
    ]


def in_play(run: Path) -> dict[str, Any] | None:
    """Asks a run that trains for its sessions in play, and gives what it told last: its servers, and its sessions,
    which come within a second or so; None where it tells nothing."""
    folder = RunFolder(run)
    with contextlib.suppress(OSError):  # then it cannot be asked
        folder.watched.touch()
    if not servers_of(run):
        return None
    told = mapping(folder.live, [])
    fresh = time.time() - float(told.get("time", 0.0)) < _FRESH_SECONDS
    return {"servers": told.get("servers") or [], "sessions": told.get("sessions") if fresh else None}


def servers_of(run: Path) -> str:
    """The addresses of the servers of a run that trains, with commas; empty where it tells none."""
    return ",".join(mapping(RunFolder(run).live, []).get("servers") or [])


def last_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of the newest iteration; empty where there are none."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = list(parse_lines(file.read(), "", []))
    except OSError:
        return {}
    metrics = lines[-1][1].get("metrics") if lines else None
    return metrics if isinstance(metrics, dict) else {}


def kept_pictures(run: Path, file: str, group: int, member: int) -> list[bytes]:
    """The pictures that the run drew of an episode for its report; empty where it drew none."""
    place = (file, group, member)
    return read_pictures(RunFolder(run).pictures, [place]).get(place, [])


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")


def held_locks() -> set[int]:
    """Inodes of the files that some process of this machine holds locked."""
    try:
        rows = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    return {int(words[5].rpartition(":")[2]) for row in rows if len(words := row.split()) > 5 and words[1] == "FLOCK"}


def status(folder: Path, facts: dict[str, Any], locks: set[int], written: float) -> str:
    """running, ended, or interrupted: neither. written: when metrics were last written.

    The lock of a trainer on this machine is seen without touching it; that of another machine is not.
    """
    if facts.get("ended"):
        return "ended"
    lock = folder / ".lock"
    try:
        if lock.stat().st_ino in locks:
            return "running"
        here = lock.read_text(encoding="utf-8").endswith(f" on {platform.node()}")
    except OSError:
        here = False
    return "running" if not here and is_recent(written) else "interrupted"


def is_recent(written: float) -> bool:
    """Whether metrics of that time are those of a run that may go on."""
    return time.time() - written < QUIET_SECONDS
