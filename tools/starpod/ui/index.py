"""SQLite index of runs and episodes: its tables, and the queries of the pages.

It can be deleted at any time, because it is built from the files of the runs and can be built again.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starpod.ui.reading import MOST_LINES

NAME = ".starpod-index.sqlite"
"""File name of the index, in the folder of the runs."""
VERSION = 10
"""Version of the tables. An index of another version is built again."""
COUNTED = 10_000
"""Results of a search for words are counted up to this number."""
SEARCHED = 20_000
"""Maximum number of episodes that a search for words finds, newest first. Other filters are applied to these."""
MOST_PARTS = 62
"""Maximum number of reward parts per run that a filter can choose by. Each is a bit of a 64-bit integer."""
POINTS = 1024
"""Maximum number of points of a run's curves. A longer run has means over 2, 4, 8, ... iterations."""

_SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, summary TEXT NOT NULL, state TEXT NOT NULL,
    -- Of its files when all that is in them had been read.
    stamps TEXT NOT NULL DEFAULT ''
);
CREATE TABLE points (
    run INTEGER NOT NULL, bucket INTEGER NOT NULL, count INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
    seconds REAL NOT NULL, env_steps REAL NOT NULL, tokens REAL NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (run, bucket)
) WITHOUT ROWID;
CREATE TABLE warnings (run INTEGER NOT NULL, step INTEGER NOT NULL, text TEXT NOT NULL);
CREATE INDEX warnings_of_run ON warnings (run);
CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL,
    step INTEGER NOT NULL, size INTEGER NOT NULL, changed INTEGER NOT NULL, problem TEXT NOT NULL,
    episodes INTEGER NOT NULL, UNIQUE (run, name)
);
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, file INTEGER NOT NULL, kind TEXT NOT NULL, step INTEGER NOT NULL,
    start INTEGER NOT NULL, grp INTEGER NOT NULL, member INTEGER NOT NULL, environment TEXT,
    seed TEXT NOT NULL, outcome TEXT NOT NULL, end TEXT NOT NULL, malformed INTEGER NOT NULL,
    truncated INTEGER NOT NULL, turns INTEGER NOT NULL, tokens INTEGER NOT NULL, reward REAL NOT NULL,
    -- A bit for each part of the reward, by `parts`: whether it paid, whether it fined.
    paid INTEGER NOT NULL, fined INTEGER NOT NULL
);
CREATE TABLE parts (run INTEGER NOT NULL, bit INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (run, name));
-- Each holds all that a filter looks at, so that episodes that do not fit are not read.
CREATE INDEX episodes_by_step
    ON episodes (run, step, grp, member, kind, outcome, malformed, truncated, environment, paid, fined);
CREATE INDEX episodes_by_reward
    ON episodes (run, reward, kind, outcome, malformed, truncated, environment, step, paid, fined);
CREATE INDEX episodes_by_seed ON episodes (run, seed);
CREATE INDEX episodes_of_file ON episodes (file, grp, member);
CREATE VIRTUAL TABLE words USING fts5 (text, content='', detail=none);
"""

SORTS = {
    "newest": "step DESC, grp DESC, member DESC",
    "oldest": "step, grp, member",
    "best": "reward DESC, id",
    "worst": "reward, id",
    "longest": "turns DESC, id",
}
"""ORDER BY clauses by the name that pages use."""
OUTCOMES = ("solved", "unsolved", "failed", "unknown")
"""Outcomes of episodes. `failed`: the infrastructure failed. `unknown`: the environment does not report success."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of a list of episodes. Empty values and None match any episode."""

    run: int
    outcome: str = ""
    kind: str = ""
    environment: str = ""
    seed: str = ""
    step: int | None = None
    malformed: bool = False
    truncated: bool = False
    paid: int = 0
    """Bits of reward parts whose sum over the episode must be positive."""
    fined: int = 0
    """Bits of reward parts whose sum over the episode must be negative."""
    text: str = ""
    """Words that must all occur in replies, actions or observations; `word*` matches longer words, too."""
    sort: str = "newest"

    def where(self) -> tuple[str, list[Any]]:
        """Return an SQL condition and its values."""
        parts: list[str] = ["run = ?"]
        values: list[Any] = [self.run]
        conditions: list[tuple[str, Any]] = [
            ("outcome", self.outcome), ("kind", self.kind), ("environment", self.environment), ("seed", self.seed),
            ("step", self.step),
        ]  # fmt: skip
        for column, value in conditions:
            if value not in ("", None):
                parts.append(f"{column} = ?")
                values.append(value)
        parts += [f"{column} > 0" for column in ("malformed", "truncated") if getattr(self, column)]
        for column in ("paid", "fined"):
            if bits := getattr(self, column):
                parts.append(f"{column} & {int(bits)}")
        if words := re.findall(r"([^\W_]+)(\*?)", self.text):
            parts.append(f"id IN (SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid DESC LIMIT {SEARCHED})")
            parts[0] = "+run = ?"  # the plus makes SQLite look up these few ids instead of reading all of the run
            values.append(" AND ".join([run_word(self.run), *(f'"{word}"{star}' for word, star in words)]))
        return " AND ".join(parts), values


@dataclass(slots=True)
class Curve:
    """The curves of a run, with at most `POINTS` points."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines as in metrics.jsonl, including warnings."""
    # What had been spent by each step of `lines` that has metrics.
    seconds: dict[int, float] = field(default_factory=dict)
    env_steps: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)


class NotAnIndex(Exception):
    """Raised for a file that is not an index. It is left unchanged."""


class IndexFile:
    """The database of a folder of runs. Any thread may use it, because each call opens a new connection.

    If its file cannot be written, the index is kept in memory and `problem` says so.

    Args:
        file: path of the index; empty: `NAME` in the folder; ":memory:": no file.

    Raises:
        NotAnIndex: the file contains something else.
    """

    def __init__(self, folder: Path, file: str = "") -> None:
        self.problem = ""
        self._target = file or str(folder / NAME)
        self._uri = False
        self._keep: sqlite3.Connection | None = None
        try:
            if file == ":memory:":
                self._use_memory()
            else:
                self._prepare()
        except (sqlite3.Error, OSError) as error:
            self.problem = f"{self._target} cannot be written ({error}): the index is in memory"
            self._use_memory()

    def _use_memory(self) -> None:
        self._target, self._uri = f"file:starpod-{id(self)}?mode=memory&cache=shared", True
        self._keep = self.connect()  # a database in memory lives as long as one connection to it
        self._create(self._keep)

    def close(self) -> None:
        if self._keep is not None:
            self._keep.close()

    def connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(
            self._target, timeout=10.0, isolation_level=None, uri=self._uri, check_same_thread=False
        )
        database.row_factory = sqlite3.Row
        if self._uri:
            # Connections that share an in-memory cache lock whole tables, and the time-out does not cover these locks:
            # pages failed while the indexer wrote. With this, a page may show half of an update until it reloads.
            database.execute("PRAGMA read_uncommitted = 1")
        return database

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with closing(self.connect()) as database:
            yield database

    def _prepare(self) -> None:
        """Create the file. Replace an existing index if it is damaged, has another version or is mostly waste.

        Raises NotAnIndex. A damaged file counts as an index only if it is called `NAME`.
        """
        for is_retry in (False, True):
            is_index = Path(self._target).name == NAME
            try:
                with closing(self.connect()) as database:
                    version = database.execute("PRAGMA user_version").fetchone()[0]
                    tables = {row["name"] for row in database.execute("SELECT name FROM sqlite_master")}
                    is_index = is_index or {"runs", "points", "episodes"} <= tables
                    if version == VERSION and is_index and not _wasteful(database):
                        database.execute("PRAGMA journal_mode = WAL")
                        return
                    if version == 0 and not tables:
                        database.execute("PRAGMA journal_mode = WAL")
                        self._create(database)
                        return
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or is_retry:
                    raise
            if not is_index:
                raise NotAnIndex(f"{self._target} is not an index of runs: name another file, or delete this one")
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    Path(self._target + suffix).unlink()

    def _create(self, database: sqlite3.Connection) -> None:
        database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")


class RunIndex:
    """The index of a folder of runs, with the queries of the pages. Its arguments are those of `IndexFile`."""

    def __init__(self, folder: Path, file: str = "") -> None:
        self.folder = folder
        self.database = IndexFile(folder, file)

    def runs(self) -> list[dict[str, Any]]:
        """Return the summaries of all runs, newest first. Each has `run`, its id in the index, and `path`."""
        with self.database.reading() as database:
            rows = database.execute("SELECT id, path, summary FROM runs").fetchall()
        summaries = [_summary(row) for row in rows]
        return sorted(summaries, key=lambda summary: summary.get("started") or 0, reverse=True)

    def run(self, path: str) -> dict[str, Any] | None:
        """Return the summary of one run; None if it is unknown."""
        with self.database.reading() as database:
            row = database.execute("SELECT id, path, summary FROM runs WHERE path = ?", (path,)).fetchone()
        return _summary(row) if row else None

    def metrics(self, run: int) -> list[str]:
        """Return the names of the metrics that the run has logged, sorted."""
        with self.database.reading() as database:
            row = database.execute("SELECT state FROM runs WHERE id = ?", (run,)).fetchone()
        return list(json.loads(row["state"]).get("names", ())) if row else []

    def curve(self, run: int, names: Sequence[str] | None = None) -> Curve:
        """Return the run's curves and warnings. names: only these metrics, which is faster; None: all."""
        curve = Curve()
        valid_names = [name for name in names or () if '"' not in name]  # SQLite's JSON paths cannot contain quotes
        places = [f'$."{name}"[0]' for name in valid_names]
        columns = "metrics" if names is None else ", ".join(["NULL", *("json_extract(metrics, ?)" for _ in places)])
        with self.database.reading() as database:
            sql = f"SELECT step, time, seconds, env_steps, tokens, {columns} FROM points WHERE run = ? ORDER BY bucket"
            for row in database.execute(sql, (*places, run)):
                step = row["step"]
                if names is None:
                    metrics = {name: mean for name, (mean, _) in json.loads(row["metrics"]).items()}
                else:
                    metrics = {name: mean for name, mean in zip(valid_names, row[6:], strict=True) if mean is not None}
                curve.lines.append({"step": step, "time": row["time"], "metrics": metrics})
                curve.seconds[step], curve.env_steps[step] = row["seconds"], row["env_steps"]
                curve.tokens[step] = row["tokens"]
            events = database.execute("SELECT step, text FROM warnings WHERE run = ? ORDER BY step", (run,)).fetchall()
        last_time = curve.lines[-1]["time"] if curve.lines else 0.0
        for step, text in events:
            curve.lines.append({"step": step, "time": last_time, "metrics": {}, "warnings": [text]})
        curve.lines.sort(key=lambda line: line["step"])
        return curve

    def files(self, run: int) -> list[dict[str, Any]]:
        """Return the rows of the run's files of episodes: name, kind, step, problem, number of episodes and so on."""
        with self.database.reading() as database:
            rows = database.execute("SELECT * FROM files WHERE run = ? ORDER BY step, name", (run,)).fetchall()
        return [dict(row) for row in rows]

    def episodes(
        self, conditions: Filter, *, first: int = 0, limit: int = 50, count: int | None = None
    ) -> list[dict[str, Any]]:
        """Return rows of episodes in the filter's order; `name` is the name of their file.

        Args:
            first: number of matching episodes to skip.
            count: number of matching episodes, if known. Pages in the second half of the list are read from its end.
        """
        where, values = conditions.where()
        order = inner_order = SORTS.get(conditions.sort, SORTS["newest"])
        if count is not None and 2 * first > count:
            inner_order, limit = _reversed(order), max(min(limit, count - first), 0)
            first = count - first - limit
        with self.database.reading() as database:
            # The inner query reads only an index, so late pages of a long list are fast, too.
            rows = database.execute(
                "SELECT episodes.*, (SELECT name FROM files WHERE files.id = file) AS name FROM episodes WHERE id IN "
                f"(SELECT id FROM episodes WHERE {where} ORDER BY {inner_order} LIMIT ? OFFSET ?) ORDER BY {order}",
                (*values, limit, first),
            ).fetchall()
        return [dict(row) for row in rows]

    def search(self, conditions: Filter, *, first: int = 0, limit: int = 50) -> tuple[list[dict[str, Any]], int]:
        """Return the results of `episodes` and `count` for a filter with words, using only one search."""
        where, values = conditions.where()
        order = SORTS.get(conditions.sort, SORTS["newest"])
        with self.database.reading() as database:
            rows = database.execute(
                "SELECT episodes.*, (SELECT name FROM files WHERE files.id = file) AS name, count(*) OVER () AS found "
                f"FROM episodes WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                (*values, limit, first),
            ).fetchall()
        if not rows and first:
            return [], self.count(conditions)
        episodes = [dict(row) for row in rows]
        counts = [row.pop("found") for row in episodes]
        return episodes, min(counts[0], COUNTED + 1) if counts else 0

    def count(self, conditions: Filter) -> int:
        """Return the number of matching episodes. A filter with words counts up to `COUNTED` + 1."""
        where, values = conditions.where()
        bound = f"LIMIT {COUNTED + 1}" if conditions.text else ""
        sql = f"SELECT count(*) FROM (SELECT 1 FROM episodes WHERE {where} {bound})"
        if conditions == Filter(conditions.run, kind=conditions.kind, step=conditions.step, sort=conditions.sort):
            sql = f"SELECT coalesce(sum(episodes), 0) FROM files WHERE {where}"
        with self.database.reading() as database:
            return int(database.execute(sql, values).fetchone()[0])

    def facets(self, run: int) -> dict[str, list[Any]]:
        """Return the kinds, environments, steps and reward parts (with their bits) that a filter can choose from."""
        with self.database.reading() as database:
            files = database.execute("SELECT DISTINCT kind, step FROM files WHERE run = ?", (run,)).fetchall()
            row = database.execute("SELECT summary FROM runs WHERE id = ?", (run,)).fetchone()
            parts = database.execute("SELECT bit, name FROM parts WHERE run = ? ORDER BY name", (run,)).fetchall()
        return {
            "parts": [(part["name"], part["bit"]) for part in parts],
            "kinds": sorted({file["kind"] for file in files}),
            "steps": sorted({file["step"] for file in files}, reverse=True),
            "environments": json.loads(row["summary"]).get("environments", []) if row else [],
        }

    def episode(self, run: int, name: str, grp: int, member: int) -> dict[str, Any] | None:
        """Return the row of an episode; None if there is none."""
        with self.database.reading() as database:
            row = database.execute(
                "SELECT episodes.*, files.name AS name FROM episodes JOIN files ON files.id = file "
                "WHERE files.run = ? AND files.name = ? AND grp = ? AND member = ?",
                (run, name, grp, member),
            ).fetchone()
        return dict(row) if row else None

    def group(self, run: int, name: str, grp: int) -> list[dict[str, Any]]:
        """Return the rows of a group's members, sorted by member."""
        with self.database.reading() as database:
            rows = database.execute(
                "SELECT episodes.*, files.name AS name FROM episodes JOIN files ON files.id = file "
                "WHERE files.run = ? AND files.name = ? AND grp = ? ORDER BY member",
                (run, name, grp),
            ).fetchall()
        return [dict(row) for row in rows]


def run_word(run: int) -> str:
    """Return the artificial word that is added to a run's texts, so that a search can be restricted to the run."""
    return f"starpodrun{run}x"


def episode_id(step: int, file: int, place: int) -> int:
    """Return the id of an episode. Ids grow with the step, so that a search finds the newest episodes first.

    Args:
        step: step of the run; a negative one counts as 0.
        place: number of readable lines before the episode in its file, less than MOST_LINES.
    """
    return (min(max(step, 0), 2**23 - 1) << 40) + (file % 2**22 * MOST_LINES) + place


def _reversed(order: str) -> str:
    columns = order.split(", ")
    return ", ".join(term.removesuffix(" DESC") if term.endswith(" DESC") else f"{term} DESC" for term in columns)


def _wasteful(database: sqlite3.Connection) -> bool:
    """Return whether most indexed words belong to removed episodes. SQLite before 3.43 cannot delete single entries."""
    word_rows = database.execute("SELECT count(*) FROM words_docsize").fetchone()[0]
    episode_rows = database.execute("SELECT count(*) FROM episodes").fetchone()[0]
    return bool(word_rows > 100_000 + 4 * episode_rows)


def _summary(row: sqlite3.Row) -> dict[str, Any]:
    return {**json.loads(row["summary"]), "run": row["id"], "path": row["path"]}
