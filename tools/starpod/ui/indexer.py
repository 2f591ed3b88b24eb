"""A thread that keeps the index up to date with the files of the runs.

Metrics are read from where the last pass stopped. Files of episodes never change, so each is read once.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starpod.report.curves import smooth, spread
from starpod.trainer.data.untrusted import open_regular, read_json
from starpod.trainer.diagnostics.metrics import spent_in
from starpod.trainer.output.words import evaluation_after_best, missing_result, standing_warnings
from starpod.ui.index import MOST_PARTS, POINTS, RunIndex, episode_id, run_word
from starpod.ui.reading import (
    DAMAGED,
    MOST_PROBLEMS,
    BadFile,
    episode_lines,
    find_runs,
    held_locks,
    is_recent,
    mapping,
    objects,
    parse_lines,
    read_notes,
    status,
)

CHUNK = 8 * 2**20
"""Bytes of metrics that are read and committed at a time."""
TEXT = 20_000
"""Number of characters of an episode that can be searched, from its beginning."""
SPARK = 60
"""Maximum number of points of a run's sparkline."""
_SUMMARISED = ("config.yaml", "run.json", "metrics.jsonl", "evaluations.jsonl", "final.json", "notes.json")
"""Files from which the summary of a run is made."""
MOST_METRICS = 2_000
"""Maximum number of a run's metrics that are read. The trainer writes about 200."""
_MORE_METRICS = f" has more than {MOST_METRICS:,} metrics, and the others are not shown"
_MOST_INTEGER = 2**62
"""Maximum value of integers in the index, because SQLite's integers have 64 bits."""
_MOST_FLOAT = 1e300
"""Maximum value of a metric, so that sums of many values are finite."""


class Indexer(threading.Thread):
    """Updates the index about once a second until `stop`.

    Attributes:
        problem: sentences that say why the index is not up to date; empty if it is.
        progress: what is being read; empty between passes.
        changes: number of changes to any run so far.
    """

    def __init__(self, index: RunIndex, *, seconds: float = 1.0) -> None:
        super().__init__(name="starpod-indexer", daemon=True)
        self.problem = ""
        self.progress = ""
        self._index = index
        self._seconds = seconds
        self._stopping = threading.Event()
        self._unreadable: dict[str, tuple[str, str]] = {}
        self._changes: dict[str, int] = {}
        self.changes = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            self.update()
            self._stopping.wait(self._seconds)

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()

    def changes_of(self, path: str = "") -> int:
        """Return the number of changes so far to a run, or to any run if none is given."""
        return self._changes.get(path, 0) if path else self.changes

    def update(self) -> None:
        """Make one pass over all runs. Errors are reported in `problem`, and the next pass tries again."""
        try:
            with closing(self._index.connect()) as database:
                self.problem = self._pass(database)
        except sqlite3.Error as error:
            self.problem = f"The index cannot be written ({error}). Pages show older data; make room."
        except OSError as error:
            self.problem = f"The runs cannot be read: {error}"
        finally:
            self.progress = ""

    def _pass(self, database: sqlite3.Connection) -> str:
        """Read everything that is new. Returns sentences about runs that cannot be read; empty if there are none."""
        runs = find_runs(self._index.folder)
        self._unreadable = {path: entry for path, entry in self._unreadable.items() if path in runs}
        locks = held_locks()
        rows = database.execute("SELECT id, path, stamps FROM runs").fetchall()
        run_ids, run_stamps = ({row["path"]: row[name] for row in rows} for name in ("id", "stamps"))
        for path in run_ids.keys() - runs.keys():
            with _transaction(database):
                for table in ("points", "warnings", "files", "episodes", "parts"):
                    database.execute(f"DELETE FROM {table} WHERE run = ?", (run_ids[path],))
                database.execute("DELETE FROM runs WHERE id = ?", (run_ids[path],))
            self._changed(path)
        changed_runs = []
        for number, (path, folder) in enumerate(runs.items(), 1):
            stamps = json.dumps(_stamps(folder, locks))
            if stamps in (run_stamps.get(path), self._unreadable.get(path, ("", ""))[0]):
                continue
            self._unreadable.pop(path, None)
            self.progress = f"reading run {number:,} of {len(runs):,}"
            try:
                while not self._stopping.is_set() and _read_run(database, path, folder, locks):
                    self._changed(path)
                changed_runs.append((path, folder, stamps))
            except DAMAGED as error:
                self._set_aside(path, stamps, error)
            self._changed(path)
        for number, (path, folder, stamps) in enumerate(changed_runs, 1):
            try:
                self._episodes(database, path, folder, f"run {number:,} of {len(changed_runs):,}")
                if not self._stopping.is_set():
                    database.execute("UPDATE runs SET stamps = ? WHERE path = ?", (stamps, path))
            except DAMAGED as error:
                self._set_aside(path, stamps, error)
        return " ".join(sentence for _, sentence in list(self._unreadable.values())[:3])

    def _set_aside(self, path: str, stamps: str, error: Exception) -> None:
        """Skip a run until its files change, and report it. One bad file must not keep other runs out of the index."""
        reason = str(error)[:200].encode(errors="replace").decode()
        sentence = f"The files of {path} are not those of a run, and are not read: {reason}."
        self._unreadable[path] = stamps, sentence

    def _episodes(self, database: sqlite3.Connection, path: str, folder: Path, whose: str) -> None:
        """Add a run's new files of episodes to the index, and remove deleted and changed ones."""
        run = database.execute("SELECT id FROM runs WHERE path = ?", (path,)).fetchone()["id"]
        files = _episode_files(folder / "episodes")
        known_files = {
            row["name"]: (row["id"], (row["size"], row["changed"]))
            for row in database.execute("SELECT id, name, size, changed FROM files WHERE run = ?", (run,))
        }
        for name, (file, stamp) in known_files.items():
            if files.get(name) != stamp:
                with _transaction(database):
                    _forget(database, file)
                self._changed(path)
        names = [name for name in files if known_files.get(name, (0, None))[1] != files[name]]
        names.sort(key=lambda name: files[name][1], reverse=True)
        environments: set[str] = set()
        for number, name in enumerate(names, 1):
            if self._stopping.is_set():
                return
            self.progress = f"reading episodes: file {number:,} of {len(names):,}, {whose}"
            with _transaction(database):
                environments |= _read_episodes(database, run, folder / "episodes" / name, files[name])
            self._changed(path)
        if environments:
            with _transaction(database):
                summary = json.loads(
                    database.execute("SELECT summary FROM runs WHERE id = ?", (run,)).fetchone()["summary"]
                )
                summary["environments"] = sorted({*summary.get("environments", []), *environments})
                database.execute("UPDATE runs SET summary = ? WHERE id = ?", (json.dumps(summary), run))

    def _changed(self, path: str) -> None:
        self.changes += 1
        self._changes[path] = self._changes.get(path, 0) + 1


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _stamps(folder: Path, locks: set[int]) -> list[Any]:
    """Return values that change whenever the summary of a run may change.

    They are inode, size and time of each file, whether a trainer holds the run's lock, and whether metrics are recent.
    """
    stamps: list[Any] = []
    for name in (*_SUMMARISED, "episodes"):
        try:
            stat = os.stat(folder / name)
            stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            stamps.append(None)
    try:
        is_held = os.stat(folder / ".lock").st_ino in locks
    except OSError:
        is_held = False
    try:
        is_fresh = is_recent(os.stat(folder / "metrics.jsonl").st_mtime)
    except OSError:
        is_fresh = False
    return [*stamps, is_held, is_fresh]


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bucket:
    """The iterations of one point of the curves. Fields without a docstring have the values of the last iteration."""

    count: int = 0
    """Number of iterations."""
    step: int = 0
    time: float = 0.0
    seconds: float = 0.0
    env_steps: float = 0.0
    tokens: float = 0.0
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Sum of each metric, and the number of iterations that logged it."""

    def merge(self, later: _Bucket) -> None:
        self.count += later.count
        self.step, self.time, self.seconds = later.step, later.time, later.seconds
        self.env_steps, self.tokens = later.env_steps, later.tokens
        for name, (total, count) in later.sums.items():
            entry = self.sums.setdefault(name, [0.0, 0])
            entry[0] += total
            entry[1] += count

    def row(self, run: int, number: int) -> tuple[Any, ...]:
        means = json.dumps({name: [total / count, count] for name, (total, count) in self.sums.items()})
        return (run, number, self.count, self.step, self.time, self.seconds, self.env_steps, self.tokens, means)

    @classmethod
    def of(cls, row: sqlite3.Row) -> _Bucket:
        sums = {name: [mean * count, count] for name, (mean, count) in json.loads(row["metrics"]).items()}
        return cls(row["count"], row["step"], row["time"], row["seconds"], row["env_steps"], row["tokens"], sums)


@dataclass(slots=True)
class _Place:
    """The place up to which metrics.jsonl has been read."""

    inode: int = 0
    offset: int = 0
    tail: str = ""
    """Last bytes before `offset`, in hexadecimal. If they differ, the file was replaced."""
    lines: int = 0
    kept: int = 0
    """Number of iterations in the curves."""
    stride: int = 1
    """Number of iterations per point of the curves."""
    names: list[str] = field(default_factory=list)
    """Names of the metrics in the file."""
    problems: list[str] = field(default_factory=list)


def _read_run(database: sqlite3.Connection, path: str, folder: Path, locks: set[int]) -> bool:
    """Read a run's new metrics, up to `CHUNK` bytes, and its summary. Returns whether there are more metrics."""
    with _transaction(database):
        # A new run is inserted with its summary, because pages read an index in memory while it is written.
        row = database.execute(
            "SELECT id, summary, state FROM runs WHERE path = ? "
            "UNION ALL SELECT coalesce(max(id), 0) + 1, '{}', '{}' FROM runs LIMIT 1",
            (path,),
        ).fetchone()
        run = row["id"]
        place, has_more = _read_metrics(database, run, folder / "metrics.jsonl", _Place(**json.loads(row["state"])))
        summary = _summarise(database, run, folder, place, locks)
        summary["environments"] = json.loads(row["summary"]).get("environments", [])
        database.execute(
            "INSERT INTO runs (id, path, summary, state) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET summary = excluded.summary, state = excluded.state",
            (run, path, json.dumps(summary), json.dumps(asdict(place))),
        )
    return has_more


def _read_metrics(database: sqlite3.Connection, run: int, path: Path, place: _Place) -> tuple[_Place, bool]:
    """Add new lines to the curves. Returns the place reached, and whether there are more lines."""
    try:
        with open_regular(path) as file:
            inode = os.fstat(file.fileno()).st_ino
            tail = bytes.fromhex(place.tail)
            file.seek(place.offset - len(tail))
            if inode != place.inode or file.read(len(tail)) != tail:
                # The file was replaced: a resumed run drops the iterations that it repeats. Read it from the start.
                place = _Place(inode=inode)
                database.execute("DELETE FROM points WHERE run = ?", (run,))
                database.execute("DELETE FROM warnings WHERE run = ?", (run,))
                file.seek(0)
            data = file.read(CHUNK)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return place, False
    except OSError as error:
        place.problems = [f"{path.name} cannot be read: {error.strerror}"]
        return place, False
    full_lines = data[: data.rfind(b"\n") + 1]
    if not full_lines and len(data) == CHUNK:
        place.problems = [f"{path.name}: line {place.lines + 1} is longer than {CHUNK // 2**20} MiB, and not read"]
    data = full_lines
    if data:
        _add_lines(database, run, path.name, place, data)
    return place, bool(data) and place.offset + CHUNK // 2 < size


def _add_lines(database: sqlite3.Connection, run: int, name: str, place: _Place, data: bytes) -> None:
    """Add complete lines of metrics to the curves. Points are merged in pairs when there are more than `POINTS`."""
    buckets = {row["bucket"]: _Bucket.of(row) for row in database.execute("SELECT * FROM points WHERE run = ?", (run,))}
    stride = place.stride
    numbers: set[int] = set()
    last_bucket = buckets[max(buckets)] if buckets else _Bucket()
    warnings: list[tuple[int, int, str]] = []
    names = set(place.names)
    for row, line in parse_lines(data, name, place.problems, before=place.lines):
        bucket = _bucket_of(line, last_bucket)
        if bucket is None:
            place.problems = [*place.problems, f"{name}, line {row}, is not an iteration, and is skipped"][
                :MOST_PROBLEMS
            ]
            continue
        warnings += [(run, bucket.step, str(text)) for text in line.get("warnings") or ()]
        for metric in [metric for metric in bucket.sums if metric not in names]:
            if len(names) < MOST_METRICS:
                names.add(metric)
                continue
            del bucket.sums[metric]
            if not any(problem.endswith(_MORE_METRICS) for problem in place.problems):
                place.problems = [*place.problems, f"{name}{_MORE_METRICS}"]
        number = place.kept // place.stride
        last_bucket = buckets.setdefault(number, _Bucket())
        last_bucket.merge(bucket)
        numbers.add(number)
        place.kept += 1
        if len(buckets) > POINTS:
            buckets = _halved(buckets)
            place.stride *= 2
            last_bucket = buckets[max(buckets)]
    if place.stride != stride:
        database.execute("DELETE FROM points WHERE run = ?", (run,))
        numbers = set(buckets)
    place.names = sorted(names)
    database.executemany(
        "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [buckets[number].row(run, number) for number in sorted(numbers)],
    )
    database.executemany("INSERT INTO warnings VALUES (?, ?, ?)", warnings)
    place.offset += len(data)
    place.lines += data.count(b"\n")
    place.tail = data[-64:].hex()


def _bucket_of(line: Mapping[str, Any], last: _Bucket) -> _Bucket | None:
    """Return a bucket for one line of metrics, given the previous bucket; None if the line is not an iteration."""
    metrics, step, time = line.get("metrics"), line.get("step"), line.get("time", 0.0)
    if not isinstance(metrics, dict) or not isinstance(step, int) or _number(step) is None or _number(time) is None:
        return None
    values = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and _fits(value)}
    costs = spent_in(values)
    return _Bucket(
        1,
        step,
        time,
        last.seconds + values.get("time/step", 0.0),
        last.env_steps + costs["environment_steps"],
        last.tokens + costs["sampled_tokens"],
        {name: [value, 1] for name, value in values.items()},
    )


def _fits(value: float) -> bool:
    return -_MOST_FLOAT < value < _MOST_FLOAT


def _halved(buckets: Mapping[int, _Bucket]) -> dict[int, _Bucket]:
    halves: dict[int, _Bucket] = {}
    for number in sorted(buckets):
        halves.setdefault(number // 2, _Bucket()).merge(buckets[number])
    return halves


def _summarise(database: sqlite3.Connection, run: int, folder: Path, place: _Place, locks: set[int]) -> dict[str, Any]:
    """Return the summary of a run for the list of runs, as JSON values."""
    problems = list(place.problems)
    facts, config = mapping(folder / "run.json", problems), mapping(folder / "config.yaml", problems)
    final = mapping(folder / "final.json", problems)
    evaluations = [line for line in objects(folder / "evaluations.jsonl", problems) if line.get("success") is not None]
    points = database.execute(
        "SELECT count, step, time, seconds, metrics FROM points WHERE run = ? ORDER BY bucket", (run,)
    ).fetchall()
    warnings = standing_warnings(database.execute("SELECT step, text FROM warnings WHERE run = ?", (run,)).fetchall())
    success = [
        (row["step"], mean)
        for row in points
        if (mean := json.loads(row["metrics"]).get("collect/success", [None])[0]) is not None
    ]
    start_time = _number(facts.get("time"))
    written = points[-1]["time"] if points else start_time or 0.0
    tasks = _part(config, "environments")
    environment, stop = _part(config, "environment"), _part(config, "stop")
    environments = ", ".join(str(_part(tasks, name).get("id") or name) for name in tasks)
    evaluation = final or (evaluations[-1] if evaluations else {})
    last = evaluation_after_best(final, evaluations)
    state = status(folder, facts, locks, written)
    seconds = points[-1]["seconds"] if points else 0.0
    return {
        **read_notes(folder, problems),
        "title": str(facts.get("title") or ""),
        "environment": environments or str(environment.get("id") or ""),
        "algorithm": str(_part(config, "algorithm").get("preset") or ""),
        "model": str(facts.get("model") or ""),
        "started": start_time or written,
        "written": written,
        "status": state,
        "outcome": str(_part(facts, "ended").get("outcome") or ""),
        "step": points[-1]["step"] if points else 0,
        "iterations": _number(stop.get("iterations")),
        "seconds": seconds,
        "left": _left(stop, points) if state == "running" else None,
        "evaluation": {
            name: _number(evaluation.get(name))
            for name in ("step", "success", "success_low", "success_high", "return_mean", "episodes")
        }
        if _number(evaluation.get("success")) is not None
        else None,
        "missing_result": missing_result(final) if final else "",
        "final": bool(final),
        "last": last and {name: _number(last[name]) for name in ("step", "success")},
        "spark": [round(y, 4) for _, y in smooth([(x, y) for x, y in spread(success, SPARK)])],
        "warnings": len(warnings),
        "last_warning": list(warnings[-1]) if warnings else None,
        "problems": problems,
    }


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and _fits(value) else None


def _left(stop: Mapping[str, Any], points: list[sqlite3.Row]) -> float | None:
    """Return the seconds until the run reaches `iterations` or `minutes`, at the pace of the latest tenth of its curve.

    Return None without a limit, before the first iteration, when `minutes` begin to count, and once a limit is reached,
    because the final evaluation's duration is not known.
    """
    limits = []
    steps, minutes = stop.get("iterations"), stop.get("minutes")
    if isinstance(minutes, int | float) and points:
        limits.append(60 * minutes - points[-1]["seconds"])
    if isinstance(steps, int) and len(points) > 1:
        window = points[-max(len(points) // 10, 2) :]
        pace = (window[-1]["time"] - window[0]["time"]) / max(window[-1]["step"] - window[0]["step"], 1)
        limits.append(pace * (steps - window[-1]["step"]))
    seconds = min(limits, default=0.0)
    return seconds if seconds > 0 else None


# --- episodes ---------------------------------------------------------------------------------------------------------


def _episode_files(folder: Path) -> dict[str, tuple[int, int]]:
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


def _forget(database: sqlite3.Connection, file: int) -> None:
    database.execute("DELETE FROM episodes WHERE file = ?", (file,))
    database.execute("DELETE FROM files WHERE id = ?", (file,))


def _read_episodes(database: sqlite3.Connection, run: int, path: Path, stamp: tuple[int, int]) -> set[str]:
    """Add a file's episodes to the index. Returns the ids of their environments."""
    kind, _, digits = path.name.partition(".")[0].rpartition("-")
    step = int(digits) if digits.isdecimal() else -1
    file = database.execute(
        "INSERT INTO files (run, name, kind, step, size, changed, problem, episodes) VALUES (?, ?, ?, ?, ?, ?, '', 0)",
        (run, path.name, kind, step, *stamp),
    ).lastrowid
    assert file is not None
    bits = {row["name"]: row["bit"] for row in database.execute("SELECT bit, name FROM parts WHERE run = ?", (run,))}
    old_count = len(bits)
    rows: list[tuple[Any, ...]] = []
    texts, problems = [], []
    environments: set[str] = set()
    try:
        for start, line in episode_lines(path):
            number = episode_id(step, file, len(rows))
            try:
                columns, text = _episode_columns(read_json(line), bits)
            except DAMAGED as error:
                problems.append(f"an episode of {path.name} is damaged and skipped: {error}")
                continue
            environments.add(columns[2])
            rows.append((number, run, file, kind, step, start, *columns))
            texts.append((number, f"{run_word(run)} {text}"))
    except BadFile as error:
        problems.append(str(error))
    database.executemany(f"INSERT INTO episodes VALUES ({', '.join('?' * 19)})", rows)
    database.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", texts)
    database.executemany(
        "INSERT INTO parts (run, bit, name) VALUES (?, ?, ?)",
        [(run, bit, name) for name, bit in list(bits.items())[old_count:]],
    )
    values = (len(rows), problems[0] if problems else "", file)
    database.execute("UPDATE files SET episodes = ?, problem = ? WHERE id = ?", values)
    return environments


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
