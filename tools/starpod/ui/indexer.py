"""A thread that keeps the index up to date with the files of the runs.

Metrics and episodes are read from where the last pass stopped. Only the episodes of evaluations grow.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starpod.trainer.data.untrusted import open_regular
from starpod.trainer.diagnostics.metrics import spent_in
from starpod.trainer.evaluation.folder import PLAN
from starpod.ui.episode_rows import episode_files, forget_episodes, index_episodes
from starpod.ui.index import POINTS, RunIndex
from starpod.ui.reading import DAMAGED, MOST_PROBLEMS, find_runs, held_locks, is_recent, parse_lines
from starpod.ui.summary import SUMMARISED, as_number, fits, summarise

CHUNK = 8 * 2**20
"""Bytes of metrics that are read and committed at a time."""
MOST_METRICS = 2_000
"""Maximum number of a run's metrics that are read. The trainer writes about 200."""
_MORE_METRICS = f" has more than {MOST_METRICS:,} metrics, and the others are not shown"


class Indexer(threading.Thread):
    """Updates the index about once a second until `stop`.

    Attributes:
        problem: sentences that say why the index is not up to date; empty if it is.
        progress: what is being read; empty between passes.
        changes: number of changes to any run so far.
    """

    def __init__(self, index: RunIndex) -> None:
        super().__init__(name="starpod-indexer", daemon=True)
        self.problem = ""
        self.progress = ""
        self._index = index
        self._stopping = threading.Event()
        self._unreadable: dict[str, tuple[str, str]] = {}
        self._changes: dict[str, int] = {}
        self.changes = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            self.update()
            self._stopping.wait(1.0)

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
            with closing(self._index.database.connect()) as database:
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
        """Add a run's new episodes to the index, and remove those of deleted files."""
        run = database.execute("SELECT id FROM runs WHERE path = ?", (path,)).fetchone()["id"]
        files = episode_files(folder / "episodes")
        known_files = {
            row["name"]: (row["id"], (row["size"], row["changed"]))
            for row in database.execute("SELECT id, name, size, changed FROM files WHERE run = ?", (run,))
        }
        for name, (file, _) in known_files.items():
            if name not in files:
                with _transaction(database):
                    forget_episodes(database, file)
                self._changed(path)
        names = [name for name in files if known_files.get(name, (0, None))[1] != files[name]]
        names.sort(key=lambda name: files[name][1], reverse=True)
        environments: set[str] = set()
        for number, name in enumerate(names, 1):
            if self._stopping.is_set():
                return
            self.progress = f"reading episodes: file {number:,} of {len(names):,}, {whose}"
            with _transaction(database):
                environments |= index_episodes(database, run, folder / "episodes" / name, files[name])
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

    They are inode, size and time of each file, including the episodes of an evaluation, whose files grow; whether a
    trainer holds the run's lock; and whether metrics are recent.
    """
    stamps: list[Any] = [episode_files(folder / "episodes") if (folder / PLAN).exists() else None]
    for name in (*SUMMARISED, "episodes"):
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
        summary = summarise(database, run, folder, place.problems, locks)
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
    if not isinstance(metrics, dict) or not isinstance(step, int) or as_number(step) is None or as_number(time) is None:
        return None
    values = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and fits(value)}
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


def _halved(buckets: Mapping[int, _Bucket]) -> dict[int, _Bucket]:
    halves: dict[int, _Bucket] = {}
    for number in sorted(buckets):
        halves.setdefault(number // 2, _Bucket()).merge(buckets[number])
    return halves
