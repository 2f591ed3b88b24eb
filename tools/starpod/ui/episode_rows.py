"""Reads files of episodes into the index: a row of figures and the searchable text of each episode."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starpod.trainer.data.untrusted import read_json
from starpod.ui.index import MOST_PARTS, episode_id, run_word
from starpod.ui.reading import DAMAGED, BadFile, episode_lines

TEXT = 20_000
"""Number of characters of an episode that can be searched, from its beginning."""
_MOST_INTEGER = 2**62
"""Maximum value of integers in the index, because SQLite's integers have 64 bits."""


def episode_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and modification time of each file of episodes, by name."""
    files = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                regular = entry.is_file(follow_symlinks=False)
                if regular and entry.name.endswith((".jsonl", ".jsonl.gz")) and not entry.name.startswith("."):
                    stat = entry.stat()
                    files[entry.name] = (stat.st_size, stat.st_mtime_ns)
    except OSError:
        return files
    return files


def forget_episodes(database: sqlite3.Connection, file: int) -> None:
    """Remove a file and its episodes from the index."""
    database.execute("DELETE FROM episodes WHERE file = ?", (file,))
    database.execute("DELETE FROM files WHERE id = ?", (file,))


def index_episodes(database: sqlite3.Connection, run: int, path: Path, stamp: tuple[int, int]) -> set[str]:
    """Add a file's episodes to the index. Returns the ids of their environments.

    If the file has grown since it was read, only its new episodes are read. If it was replaced, its old ones are
    removed.

    Args:
        database: the index, in a transaction.
        stamp: size of the file in bytes and its modification time in nanoseconds, to notice later changes.
    """
    kind, _, digits = path.name.partition(".")[0].rpartition("-")
    step = int(digits) if digits.isdecimal() else -1
    bits = {row["name"]: row["bit"] for row in database.execute("SELECT bit, name FROM parts WHERE run = ?", (run,))}
    old_count = len(bits)
    rows: dict[tuple[int, int], tuple[Any, ...]] = {}
    texts: dict[tuple[int, int], tuple[int, str]] = {}
    environments: set[str] = set()
    known = database.execute("SELECT id, problem FROM files WHERE run = ? AND name = ?", (run, path.name)).fetchone()
    file = known and known["id"]
    place, offset = _end_of_known(database, file, path, bits) if known else (0, 0)
    problems: list[str] = [known["problem"]] if offset and known["problem"] else []
    if not offset:
        if known:
            forget_episodes(database, file)
        file = database.execute(
            "INSERT INTO files (run, name, kind, step, size, changed, problem, episodes) "
            "VALUES (?, ?, ?, ?, 0, 0, '', 0)",
            (run, path.name, kind, step),
        ).lastrowid
    try:
        for start, line in episode_lines(path, offset, place):
            if not line.endswith(b"\n"):
                break  # it is still being written
            try:
                columns, text = _episode_columns(read_json(line), bits)
            except DAMAGED as error:
                problems.append(f"an episode of {path.name} is damaged and skipped: {error}")
                continue
            environments.add(columns[2])
            key = columns[0], columns[1]  # a later line of an evaluation's file replaces an earlier one
            number = episode_id(step, file, place)
            place += 1
            rows[key] = (number, run, file, kind, step, start, *columns)
            texts[key] = (number, f"{run_word(run)} {text}")
    except BadFile as error:
        problems.append(str(error))
    database.executemany(
        "DELETE FROM episodes WHERE file = ? AND grp = ? AND member = ?", [(file, *key) for key in rows]
    )
    database.executemany(f"INSERT INTO episodes VALUES ({', '.join('?' * 19)})", [*rows.values()])
    database.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", [*texts.values()])
    database.executemany(
        "INSERT INTO parts (run, bit, name) VALUES (?, ?, ?)",
        [(run, bit, name) for name, bit in list(bits.items())[old_count:]],
    )
    database.execute(
        "UPDATE files SET size = ?, changed = ?, problem = ?, "
        "episodes = (SELECT count(*) FROM episodes WHERE file = files.id) WHERE id = ?",
        (*stamp, problems[0] if problems else "", file),
    )
    return environments


def _end_of_known(database: sqlite3.Connection, file: int, path: Path, bits: dict[str, int]) -> tuple[int, int]:
    """Return number and end of the episodes of a file that are in the index; (0, 0) if the file was replaced.

    It was replaced if the last known episode is no longer at its place. bits: see `_episode_columns`.
    """
    last = database.execute("SELECT * FROM episodes WHERE file = ? ORDER BY id DESC LIMIT 1", (file,)).fetchone()
    try:
        line = next(episode_lines(path, last["start"]))[1] if last else b""
        if last and _episode_columns(read_json(line), bits)[0] == tuple(last)[6:]:
            return last["id"] - episode_id(last["step"], file, 0) + 1, last["start"] + len(line)
    except (BadFile, StopIteration, *DAMAGED):
        pass
    return 0, 0


def _episode_columns(episode: Mapping[str, Any], bits: dict[str, int]) -> tuple[tuple[Any, ...], str]:
    """Return the columns of one episode, and its searchable text. Raises one of DAMAGED for a damaged episode.

    bits: bit number of each reward part. New parts are added to it.
    """
    turns, end, success = episode["turns"], str(episode.get("end", "")), episode.get("success")
    outcome = "solved" if success is True else "unsolved" if success is False else "unknown"
    if end == "failed":
        outcome = "failed"
    text = "\n".join(
        part for turn in turns for part in (turn.get("text", ""), *turn.get("actions", ()), turn.get("observation", ""))
    )
    sums: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.get("parts", {}).items():
            sums[name] = sums.get(name, 0.0) + value
    signs = {1: 0, -1: 0}
    for name, total in sums.items():
        bit = bits.setdefault(str(name), len(bits)) if name in bits or len(bits) < MOST_PARTS else None
        if total and bit is not None:
            signs[1 if total > 0 else -1] |= 1 << bit
    reward = float(sum(turn.get("reward", 0.0) for turn in turns))
    group, member = int(episode["group"]), int(episode["member"])
    if not math.isfinite(reward) or max(abs(group), abs(member)) > _MOST_INTEGER:
        raise ValueError("a number in it is not finite, or has too many digits")
    columns = (
        group,
        member,
        str(episode["environment"]),
        str(episode.get("seed", 0)),
        outcome,
        end,
        sum(not turn.get("well_formed", True) for turn in turns),
        sum(turn.get("finish") == "length" for turn in turns),
        len(turns),
        sum(len(turn.get("reply", ())) for turn in turns),
        reward,
        signs[1],
        signs[-1],
    )
    return columns, text[:TEXT]
