"""Episodes as JSON lines: written by runs and evaluations, read for replay, watching and offline training."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.output.files import replacing
from starpod.v1.values import MAX_REWARD

LEVEL = 1
"""Compression level. Compared with level 9, it takes a ninth of the time, and files are a sixth larger."""
SUFFIXES = (".jsonl", ".jsonl.gz")

EVALUATION = ("eval-", "final-")
"""Name prefixes of the files of evaluations in a run's folder."""


Record = TypeVar("Record")


class BadEpisodes(Exception):
    """A file of episodes cannot be used. The message names file and line, and says what is wrong."""


def write_episodes(path: Path | str, episodes: Iterable[Episode]) -> int:
    """Write one episode per line, compressed if the name ends in .gz, and return their number.

    The file only appears under its name once it is complete. Raises CannotWrite.
    """
    return write_objects(Path(path), (episode.to_json() for episode in episodes))


def write_objects(path: Path, objects: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON objects as `write_episodes` does, and return their number."""
    count = 0
    with replacing(path) as temporary, _open(temporary, "wt") as file:
        for each in objects:
            file.write(json.dumps(each, ensure_ascii=False) + "\n")
            count += 1
    return count


def append_line(path: Path, line: str) -> None:
    """Append a line to a file. Raises OSError, with the file unchanged."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError:
        # A full disk may have taken part of the line: remove it, or the next line would be joined to it.
        with suppress(OSError):
            os.truncate(path, size)
        raise


def cut_incomplete_line(path: Path) -> None:
    """Remove what a killed process left after the last line break of a file. Raises OSError."""
    with path.open("r+b") as file:
        whole_lines = sum(len(line) for line in file if line.endswith(b"\n"))
        if whole_lines < file.tell():
            file.truncate(whole_lines)


def read_episodes(path: Path | str) -> Iterator[Episode]:
    """Yield the episodes of a file, or of every file of a folder (see `episode_files`).

    Raises BadEpisodes with file, line and reason if a file is missing or damaged.
    """
    for file in episode_files(path):
        for _, episode in read_records(file, parse_episode):
            yield episode


def named_episodes(file: Path) -> Iterator[tuple[str, Episode]]:
    """Yield the episodes of a file with names such as train-000001-00003, made of its name and their lines.

    In the folder of an evaluation, the last line of each attempt counts. Raises BadEpisodes.
    """
    attempts: dict[tuple[object, ...], tuple[str, Episode]] = {}
    for number, episode in enumerate(read_episodes(file), 1):
        name = f"{file.name.partition('.jsonl')[0]}-{number:05d}"
        if episode.model:  # only evaluations record it
            attempts[episode.model, episode.kind, episode.seed, episode.member] = name, episode
        else:
            yield name, episode
    yield from attempts.values()


def read_groups(path: Path | str) -> list[Group]:
    """Return the episodes as groups to train on, numbered from 0. A group never spans files.

    Failed episodes are in their group's `failed`. The files are those of `training_files`. Raises BadEpisodes.
    """
    groups: dict[tuple[Path, int], Group] = {}
    for file in training_files(path):
        for number, episode in read_records(file, parse_episode):
            group = groups.setdefault((file, episode.group), Group(len(groups), []))
            if group.episodes and group.episodes[0].environment != episode.environment:
                raise BadEpisodes(f"{file}:{number}: group {episode.group} holds episodes of several environments")
            episode.group = group.id
            _add(group, episode)
    return list(groups.values())


def branching_groups(path: Path | str) -> list[Group]:
    """Return the groups of a file in which an episode branches from another one. Raises BadEpisodes."""
    groups: dict[int, Group] = {}
    for episode in read_episodes(path):
        _add(groups.setdefault(episode.group, Group(episode.group, [])), episode)
    return [group for group in groups.values() if any(episode.parent for episode in group.members)]


def _add(group: Group, episode: Episode) -> None:
    part = group.failed if episode.failed else group.branches if episode.apart else group.episodes
    part.append(episode)


def episode_files(path: Path | str) -> list[Path]:
    """Return the files of episodes at a path: a single file, or all *.jsonl and *.jsonl.gz of a folder by name.

    For a run's folder, these are the files in its subfolder `episodes`. Raises BadEpisodes if there are none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.exists():
        raise BadEpisodes(f"{path} does not exist")
    folder = path / "episodes" if (path / "episodes").is_dir() else path
    try:
        files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and path.name[0] != ".")
    except OSError as error:
        raise BadEpisodes(f"{folder} cannot be read: {error.strerror}") from error
    if not files:
        raise BadEpisodes(f"{folder} holds no episodes (*{' or *'.join(SUFFIXES)})")
    return files


def training_files(path: Path | str) -> list[Path]:
    """Return the files of `episode_files` without those of a folder's evaluations, whose start states are held out.

    Raises BadEpisodes if there are no others.
    """
    files = [file for file in episode_files(path) if Path(path).is_file() or not file.name.startswith(EVALUATION)]
    if not files:
        raise BadEpisodes(f"{path} holds only episodes of evaluations; name a file to train on those")
    return files


def read_records(path: Path, parse: Callable[[str], Record]) -> Iterator[tuple[int, Record]]:
    """Yield the number of each line and what `parse` makes of it. A file `*.json` is parsed as one line.

    Raises BadEpisodes with file, line and reason if the file cannot be read, or if `parse` raises ValueError.
    """
    number = 0
    try:
        with _open(path, "rt") as file:
            for number, line in enumerate([file.read()] if path.suffix == ".json" else file, 1):
                if line.strip():
                    yield number, parse(line)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise BadEpisodes(f"{path}:{number + 1}: cannot be read: {error}") from error
    except ValueError as error:
        raise BadEpisodes(f"{path}:{number}: {error}") from error


def parse_json(line: str | bytes) -> Any:
    """Return the value of a line of JSON. Raises ValueError if it is none."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def parse_episode(line: str | bytes) -> Episode:
    """Return the episode in a line of JSON. Raises ValueError if it cannot be trained on."""
    return to_episode(parse_json(line))


def to_episode(values: Any) -> Episode:
    """Return the episode in JSON values. Raises ValueError if it cannot be trained on."""
    if not isinstance(values, dict) or not isinstance(values.get("turns"), list):
        raise ValueError("not an episode: an object with `turns` is expected")
    try:
        episode = Episode.from_json(values)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"not an episode: {str(error).removeprefix('Episode.__init__() ')}") from None
    if not isinstance(episode.group, int) or not isinstance(episode.environment, str):
        raise ValueError("not an episode: `group` must be a whole number and `environment` a name")
    for number, turn in enumerate(episode.turns, 1):
        if not len(turn.reply) == len(turn.logprobs) == len(turn.versions):
            raise ValueError(
                f"turn {number} has {len(turn.reply)} sampled tokens, {len(turn.logprobs)} log-probabilities and "
                f"{len(turn.versions)} versions; these numbers must be equal"
            )
        for name in ("prompt", "reply", "versions"):
            minimum = -math.inf if name == "prompt" else 0  # images in a prompt have negative ids
            if wrong := [value for value in getattr(turn, name) if type(value) is not int or value < minimum]:
                raise ValueError(f"turn {number}: {name} holds {wrong[0]!r}; whole numbers from 0 on are expected")
        bounded = (("parts", turn.parts.values(), MAX_REWARD), ("logprobs", turn.logprobs, sys.float_info.max))
        for name, values, bound in bounded:
            if wrong := [value for value in values if type(value) not in (int, float) or not abs(value) <= bound]:
                raise ValueError(f"turn {number}: {name} holds {wrong[0]!r}; numbers of at most {bound:g} are expected")
    return episode


def _open(path: Path, mode: str) -> IO[str]:
    encoding = "utf-8-sig" if "r" in mode else "utf-8"
    if path.name.endswith(".gz"):
        return cast(IO[str], gzip.open(path, mode, compresslevel=LEVEL, encoding=encoding))
    return cast(IO[str], open(path, mode, encoding=encoding))
