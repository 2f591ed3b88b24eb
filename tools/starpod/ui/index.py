"""SQLite index of runs and episodes: the tables, and what pages ask of them.

It can be deleted at any time: the files of the runs are the truth, and it is made again from them.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

NAME = ".starpod-index.sqlite"
"""Of the file, in the folder of the runs."""
VERSION = 9
"""Of the tables; an index of another version is made again."""
COUNTED = 10_000
"""Episodes up to which those that hold some words are counted."""
SEARCHED = 20_000
"""Episodes with the words that are looked for, the newest, among which a filter chooses."""
MOST_PARTS = 62
"""Names of reward parts of a run that can be chosen by: bits of a number."""
POINTS = 1024
"""Most points that are kept of a run's curves, each the mean of as many iterations as it takes."""

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
"""Orders of episodes by the name that a page gives."""
OUTCOMES = ("solved", "unsolved", "failed", "unknown")
"""Of an episode: `failed` by the infrastructure; `unknown` where the environment says nothing of success."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes a page shows. Empty and None: any. text: words that all occur in replies, actions or
    observations, `word*` for the beginning of longer ones; the newest `SEARCHED` with them. paid, fined: bits of the
    reward parts that were above, below 0 in sum."""

    run: int
    outcome: str = ""
    kind: str = ""
    environment: str = ""
    seed: str = ""
    step: int | None = None
    malformed: bool = False
    truncated: bool = False
    paid: int = 0
    fined: int = 0
    text: str = ""
    sort: str = "newest"

    def where(self) -> tuple[str, list[Any]]:
        """A condition and its values."""
        parts: list[str] = ["run = ?"]
        values: list[Any] = [self.run]
        wanted: list[tuple[str, Any]] = [
            ("outcome", self.outcome), ("kind", self.kind), ("environment", self.environment), ("seed", self.seed),
            ("step", self.step),
        ]  # fmt: skip
        for column, value in wanted:
            if value not in ("", None):
                parts.append(f"{column} = ?")
                values.append(value)
        parts += [f"{column} > 0" for column in ("malformed", "truncated") if getattr(self, column)]
        for column in ("paid", "fined"):
            if bits := getattr(self, column):
                parts.append(f"{column} & {int(bits)}")
        if words := re.findall(r"([^\W_]+)(\*?)", self.text):
            parts.append(f"id IN (SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid DESC LIMIT {SEARCHED})")
            parts[0] = "+run = ?"  # these few are looked up, and not looked for among all of the run
            values.append(" AND ".join([run_word(self.run), *(f'"{word}"{star}' for word, star in words)]))
        return " AND ".join(parts), values


@dataclass(slots=True)
class Curve:
    """The curves of a run, at most `POINTS` of them. lines: as in metrics.jsonl, warnings included.

    seconds, env_steps, tokens: what had been spent at each of `lines` that has metrics, by step.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    env_steps: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)


class Index:
    """The database in a folder of runs. Any thread may use it; each call has a connection of its own.

    file: in the folder unless said; ":memory:" for none. Where it cannot be written, the index is in memory and
    `problem` says so.
    """

    def __init__(self, folder: Path, file: str = "") -> None:
        self.folder = folder
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
            # Connections that share a cache in memory lock whole tables, and no time-out waits for those: pages failed
            # while the indexer wrote. Now a page may see half of an update; the next one is whole.
            database.execute("PRAGMA read_uncommitted = 1")
        return database

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with closing(self.connect()) as database:
            yield database

    def _prepare(self) -> None:
        """Creates the file, or creates it anew where it is damaged, of another version, or mostly waste."""
        for again in (False, True):
            try:
                with closing(self.connect()) as database:
                    version = database.execute("PRAGMA user_version").fetchone()[0]
                    if version == VERSION and not _wasteful(database):
                        database.execute("PRAGMA journal_mode = WAL")
                        return
                    if version == 0 and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
                        database.execute("PRAGMA journal_mode = WAL")
                        self._create(database)
                        return
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or again:
                    raise
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    Path(self._target + suffix).unlink()

    def _create(self, database: sqlite3.Connection) -> None:
        database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    # --- what pages ask -------------------------------------------------------------------------------------------

    def runs(self) -> list[dict[str, Any]]:
        """Summaries of all runs, the newest first; each has `run` (its id here) and `path`."""
        with self.reading() as database:
            rows = database.execute("SELECT id, path, summary FROM runs").fetchall()
        found = [_summary(row) for row in rows]
        return sorted(found, key=lambda summary: summary.get("started") or 0, reverse=True)

    def run(self, path: str) -> dict[str, Any] | None:
        """The summary of one run."""
        with self.reading() as database:
            row = database.execute("SELECT id, path, summary FROM runs WHERE path = ?", (path,)).fetchone()
        return _summary(row) if row else None

    def metrics(self, run: int) -> list[str]:
        """Return the names of the metrics that the run has logged, in order."""
        with self.reading() as database:
            row = database.execute("SELECT state FROM runs WHERE id = ?", (run,)).fetchone()
        return list(json.loads(row["state"]).get("names", ())) if row else []

    def curve(self, run: int, names: Sequence[str] | None = None) -> Curve:
        """Return the run's curves and warnings. names: of the metrics that are wanted, which is faster than all."""
        curve = Curve()
        chosen = [name for name in names or () if '"' not in name]  # a path of SQLite cannot hold it
        places = [f'$."{name}"[0]' for name in chosen]
        wanted = "metrics" if names is None else ", ".join(["NULL", *("json_extract(metrics, ?)" for _ in places)])
        with self.reading() as database:
            found = f"SELECT step, time, seconds, env_steps, tokens, {wanted} FROM points WHERE run = ? ORDER BY bucket"
            for row in database.execute(found, (*places, run)):
                step = row["step"]
                if names is None:
                    metrics = {name: mean for name, (mean, _) in json.loads(row["metrics"]).items()}
                else:
                    metrics = {name: mean for name, mean in zip(chosen, row[6:], strict=True) if mean is not None}
                curve.lines.append({"step": step, "time": row["time"], "metrics": metrics})
                curve.seconds[step], curve.env_steps[step] = row["seconds"], row["env_steps"]
                curve.tokens[step] = row["tokens"]
            warned = database.execute("SELECT step, text FROM warnings WHERE run = ? ORDER BY step", (run,)).fetchall()
        last = curve.lines[-1]["time"] if curve.lines else 0.0
        for step, text in warned:
            curve.lines.append({"step": step, "time": last, "metrics": {}, "warnings": [text]})
        curve.lines.sort(key=lambda line: line["step"])
        return curve

    def files(self, run: int) -> list[dict[str, Any]]:
        """The run's files of episodes: name, kind, step, problem, and how many `episodes` are in each."""
        with self.reading() as database:
            rows = database.execute("SELECT * FROM files WHERE run = ? ORDER BY step, name", (run,)).fetchall()
        return [dict(row) for row in rows]

    def episodes(
        self, wanted: Filter, *, first: int = 0, most: int = 50, count: int | None = None
    ) -> list[dict[str, Any]]:
        """Rows of episodes in the filter's order; `name` is that of their file.

        count: how many fit, where it is known: the later half is then found from the end.
        """
        where, values = wanted.where()
        order = nearer = SORTS.get(wanted.sort, SORTS["newest"])
        if count is not None and 2 * first > count:
            nearer, most = _reversed(order), max(min(most, count - first), 0)
            first = count - first - most
        with self.reading() as database:
            # The inner query is answered by an index alone, however many episodes come before these.
            rows = database.execute(
                "SELECT episodes.*, (SELECT name FROM files WHERE files.id = file) AS name FROM episodes WHERE id IN "
                f"(SELECT id FROM episodes WHERE {where} ORDER BY {nearer} LIMIT ? OFFSET ?) ORDER BY {order}",
                (*values, most, first),
            ).fetchall()
        return [dict(row) for row in rows]

    def search(self, wanted: Filter, *, first: int = 0, most: int = 50) -> tuple[list[dict[str, Any]], int]:
        """`episodes` and `count` of a search for words, which are looked for once."""
        where, values = wanted.where()
        order = SORTS.get(wanted.sort, SORTS["newest"])
        with self.reading() as database:
            rows = database.execute(
                "SELECT episodes.*, (SELECT name FROM files WHERE files.id = file) AS name, count(*) OVER () AS found "
                f"FROM episodes WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                (*values, most, first),
            ).fetchall()
        if not rows and first:
            return [], self.count(wanted)
        found = [dict(row) for row in rows]
        counts = [row.pop("found") for row in found]
        return found, min(counts[0], COUNTED + 1) if counts else 0

    def count(self, wanted: Filter) -> int:
        """How many fit; of a search for words `COUNTED` + 1 where there are more than `COUNTED`."""
        where, values = wanted.where()
        bound = f"LIMIT {COUNTED + 1}" if wanted.text else ""
        counted = f"SELECT count(*) FROM (SELECT 1 FROM episodes WHERE {where} {bound})"
        if wanted == Filter(wanted.run, kind=wanted.kind, step=wanted.step, sort=wanted.sort):
            counted = f"SELECT coalesce(sum(episodes), 0) FROM files WHERE {where}"
        with self.reading() as database:
            return int(database.execute(counted, values).fetchone()[0])

    def facets(self, run: int) -> dict[str, list[Any]]:
        """The kinds, environments, steps and reward parts (with their bits) of a run's episodes, to choose from."""
        with self.reading() as database:
            files = database.execute("SELECT DISTINCT kind, step FROM files WHERE run = ?", (run,)).fetchall()
            row = database.execute("SELECT summary FROM runs WHERE id = ?", (run,)).fetchone()
            parts = database.execute("SELECT bit, name FROM parts WHERE run = ? ORDER BY name", (run,)).fetchall()
        return {
            "parts": [(each["name"], each["bit"]) for each in parts],
            "kinds": sorted({file["kind"] for file in files}),
            "steps": sorted({file["step"] for file in files}, reverse=True),
            "environments": json.loads(row["summary"]).get("environments", []) if row else [],
        }

    def episode(self, run: int, name: str, grp: int, member: int) -> dict[str, Any] | None:
        """One episode's row by its file, group and member."""
        with self.reading() as database:
            row = database.execute(
                "SELECT episodes.*, files.name AS name FROM episodes JOIN files ON files.id = file "
                "WHERE files.run = ? AND files.name = ? AND grp = ? AND member = ?",
                (run, name, grp, member),
            ).fetchone()
        return dict(row) if row else None

    def group(self, run: int, name: str, grp: int) -> list[dict[str, Any]]:
        """The rows of a group's members, in order."""
        with self.reading() as database:
            rows = database.execute(
                "SELECT episodes.*, files.name AS name FROM episodes JOIN files ON files.id = file "
                "WHERE files.run = ? AND files.name = ? AND grp = ? ORDER BY member",
                (run, name, grp),
            ).fetchall()
        return [dict(row) for row in rows]


def run_word(run: int) -> str:
    """The word by which a run's episodes are found among those of all runs. Nobody else writes it."""
    return f"starpodrun{run}x"


def episode_id(step: int, file: int, place: int) -> int:
    """The id of an episode in the index: those of later steps are larger, so that a search finds the newest first."""
    return (min(max(step, 0), 2**23 - 1) << 40) + (file % 2**22 << 18) + place


def _reversed(order: str) -> str:
    columns = order.split(", ")
    return ", ".join(each.removesuffix(" DESC") if each.endswith(" DESC") else f"{each} DESC" for each in columns)


def _wasteful(database: sqlite3.Connection) -> bool:
    """Whether most words are of episodes that are gone: SQLite before 3.43 cannot remove them one by one."""
    given = database.execute("SELECT count(*) FROM words_docsize").fetchone()[0]
    left = database.execute("SELECT count(*) FROM episodes").fetchone()[0]
    return bool(given > 100_000 + 4 * left)


def _summary(row: sqlite3.Row) -> dict[str, Any]:
    return {**json.loads(row["summary"]), "run": row["id"], "path": row["path"]}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
