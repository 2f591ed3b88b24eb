"""Sessions of a standalone gateway. Callers begin, reward and end them. Each session becomes an episode.

Each session has a journal with a line per event, which is written before the event is acknowledged. A gateway that was
killed restores its sessions from the journals. When a session ends, it becomes a line in the episode file of its group,
in the trainer's format. That file is replaced as a whole, so that ending a session twice leaves one episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast, get_args

from starpod.gateway.requests import Rejected, bad_request
from starpod.gateway.session import NAME, Replied, RolloutSession, Sampler
from starpod.trainer.data.episode import EXTERNAL, End, Episode
from starpod.trainer.data.files import BadEpisodes, append_line, read_episodes, write_episodes
from starpod.trainer.output.files import write_atomic

logger = logging.getLogger(__name__)

MOST_SESSIONS = 1024
"""Default maximum number of live sessions."""


@dataclass(eq=False)
class Record:
    """One live session with its episode so far."""

    session: RolloutSession
    episode: Episode
    journal: Path
    rewarded: set[str] = field(default_factory=set)
    """Keys of the rewards given so far. A reward with a repeated key adds nothing."""
    called: float = field(default_factory=time.monotonic)
    """When the session was last called."""

    def log(self, kind: str, **values: Any) -> None:
        """Append a line to the journal. Raise OSError if that fails, with the journal unchanged."""
        append_line(self.journal, json.dumps({"kind": kind, **values}, ensure_ascii=False) + "\n")

    def add_reply(self, replied: Replied) -> None:
        self.called = time.monotonic()
        self.log("reply", **replied.to_json())
        self._append_turn(replied)

    def _append_turn(self, replied: Replied) -> None:
        turn = replied.turn
        turn.parts = {"environment": 0.0}
        self.episode.turns.append(turn)

    def reward(self, value: float, key: str) -> None:
        """Add a reward to the turn of the last reply. A repeated `key` adds nothing."""
        if key and key in self.rewarded:
            return
        if not self.episode.turns:
            raise Rejected(HTTPStatus.CONFLICT, "no_reply", "there is no reply to reward yet")
        self.log("reward", value=value, key=key)
        self._add_reward(value, key)

    def _add_reward(self, value: float, key: str) -> None:
        self.episode.turns[-1].parts["environment"] += value
        self.rewarded.add(key)

    def replay(self, values: dict[str, Any]) -> None:
        """Apply a line of the journal."""
        match values.pop("kind"):
            case "reply":
                replied = Replied.from_json(values)
                self.session.restore(replied)
                self._append_turn(replied)
            case "reward":
                self._add_reward(values["value"], values["key"])
            case "end":
                _finish(self.episode, values)


class Records:
    """The sessions of a gateway. A folder has their journals (`sessions`) and their episodes by group (`episodes`).

    Each session is one member of a group. Its place in the group is never given to another session.
    Call `restore` before use.

    Args:
        sampler: how replies are sampled.
        folder: the folder.
        most: maximum number of live sessions.
        begins_unknown: whether an unknown API key begins a session.
        idle_seconds: a session without a call for this long is ended as failed.

    Attributes:
        abandoned: number of sessions that were ended because they were idle.
    """

    def __init__(
        self,
        sampler: Sampler,
        folder: Path,
        *,
        max_sessions: int = MOST_SESSIONS,
        begins_unknown: bool = True,
        idle_seconds: float = math.inf,
    ) -> None:
        self.sampler = sampler
        self.folder = folder
        self.max_sessions = max_sessions
        self.begins_unknown = begins_unknown
        self.idle_seconds = idle_seconds
        self.abandoned = 0
        self._live: dict[str, Record] = {}
        self._over: dict[str, float | None] = {}
        """Sum of rewards of each session that is over; None if it was idle or its journal cannot be read."""
        self._groups = 0
        self._members: dict[tuple[int, int], str] = {}
        (folder / "sessions").mkdir(parents=True, exist_ok=True)

    def restore(self) -> None:
        """Restore sessions from the journals. A cut last line is dropped, because its event was never acknowledged.

        If another line cannot be read, the session ends as failed and its journal is kept under another name. Another
        file that cannot be read is reported and has no effect on other sessions.
        """
        sessions = self.folder / "sessions"
        for over_file in sessions.glob("[!.]*.over"):
            name = over_file.stem
            self._over[name] = None
            try:
                values = json.loads(over_file.read_text(encoding="utf-8"))
                abandoned = values.get("abandoned", False)
                self._reserve_place(name, values["group"], values["member"])
                self._over[name] = None if abandoned else values["reward"]
                self.abandoned += abandoned
            except Exception as error:  # a bad file must not stop the other sessions
                logger.warning("%s: %r; its session is over, but its reward and place are unknown", over_file, error)
        for file in (self.folder / "episodes").glob("group-*.jsonl"):  # so that no new session gets its group
            self._groups = max(self._groups, int(file.stem.removeprefix("group-")) + 1)
        for unreadable in sessions.glob("*.unreadable"):
            self._over[unreadable.stem] = None
        for journal in sorted(sessions.glob("*.jsonl")):
            self._restore(journal)

    def _restore(self, journal: Path) -> None:
        name, data = journal.stem, journal.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(journal, end)
        if not end:
            journal.unlink()
            return
        record: Record | None = None
        values: dict[str, Any] = {}
        number = 1
        try:
            for line in data[:end].splitlines():
                values = json.loads(line)
                if record is None:
                    record = self._add(name, values)
                else:
                    record.replay(values)
                number += 1
        except Exception as error:  # a bad journal must not stop the other sessions
            backup = journal.with_suffix(".unreadable")
            logger.warning(
                "%s, line %d: %r; its session ends as failed. Kept as %s", journal, number, error, backup.name
            )
            if record is not None:
                problem = f"line {number} of the session's journal cannot be read"
                _finish(record.episode, {"end": "failed", "success": None, "error": problem})
                self._write(name, record, abandoned=False)
            self._over[name] = None
            journal.replace(backup)
            return
        if record is not None and record.episode.end:
            abandoned = values.get("abandoned", False)
            # A session with a file `.over` was counted: the gateway was killed before it removed the journal.
            self.abandoned += abandoned and name not in self._over
            self._write(name, record, abandoned=abandoned)
            journal.unlink()

    def find(self, name: str) -> RolloutSession:
        """Return the session with this name. If it is unknown, begin it or, unless `begins_unknown`, raise Rejected."""
        if name in self._live or name in self._over:
            return self.record(name).session
        if not self.begins_unknown:
            raise Rejected(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the API key names no session: begin one first")
        return self.begin(name, {}).session

    def begin(self, name: str, values: Mapping[str, Any]) -> Record:
        """Begin a session, or return the record of a live one with this name.

        Args:
            name: name of the session; empty: a random one.
            values: fields of the session's episode. Defaults: a new group, and the next free member of the group.

        Raises:
            Rejected: The name is malformed or was used before, the member is taken, or too many sessions are live.
            OSError: The journal cannot be written.
        """
        name = name or f"s-{uuid.uuid4().hex}"
        if not NAME.fullmatch(name):
            raise bad_request(
                "a session's name has letters, digits, `.`, `_` and `-`, at most 128, a letter or digit first"
            )
        if name in self._live:
            record = self.record(name)
            if other := {key: got for key, value in values.items() if (got := getattr(record.episode, key)) != value}:
                raise Rejected(HTTPStatus.CONFLICT, "session_differs", f"the session {name} runs with {other}")
            return record
        if name in self._over:
            raise Rejected(HTTPStatus.GONE, "session_over", f"the session {name} is over; begin one with another name")
        if len(self._live) >= self.max_sessions:
            raise Rejected(
                HTTPStatus.TOO_MANY_REQUESTS, "too_many_sessions", f"{self.max_sessions} sessions run: end some first"
            )
        group = values.get("group", self._groups)
        member = values.get("member")
        if member is None:
            member = next(number for number in itertools.count() if (group, number) not in self._members)
        if (holder := self._members.get((group, member))) is not None:
            cause = f"member {member} of group {group} is the session {holder}"
            raise Rejected(HTTPStatus.CONFLICT, "member_taken", f"{cause}: give another, or none for the next free one")
        fields = {"environment": EXTERNAL, **values, "group": group, "member": member}
        record = self._add(name, fields)
        try:
            record.log("begin", **fields)
        except OSError:
            del self._live[name], self._members[group, member]
            raise
        return record

    def record(self, name: str) -> Record:
        """Return a live session's record and count this as a call of the session. Raise Rejected if it is not live."""
        if name in self._over:
            raise Rejected(HTTPStatus.GONE, "session_over", f"the session {name} is over")
        if (record := self._live.get(name)) is None:
            raise Rejected(HTTPStatus.NOT_FOUND, "no_session", f"there is no live session {name!r}")
        record.called = time.monotonic()
        return record

    def end(self, name: str, values: Mapping[str, Any]) -> float:
        """End a session, write its episode and return the sum of its rewards. Ending it again changes nothing."""
        if name in self._over:
            if (total_reward := self._over[name]) is not None:
                return total_reward
            raise Rejected(HTTPStatus.GONE, "session_over", f"the session {name} has ended as failed, which stays so")
        record = self.record(name)
        end = str(values.get("end") or "terminal")
        if end not in get_args(End):
            raise bad_request(f"`end` is {end[:40]!r}; use one of {', '.join(filter(None, get_args(End)))}")
        self._end(name, record, end=end, success=values.get("success"), error=str(values.get("error") or ""))
        return record.episode.total_reward

    def counts(self) -> dict[str, int]:
        """Return the numbers of live, ended and abandoned sessions, and the limit of live ones."""
        return {
            "live": len(self._live),
            "most": self.max_sessions,
            "over": len(self._over),
            "abandoned": self.abandoned,
        }

    async def watch(self) -> None:
        """End idle sessions regularly, until cancelled."""
        while True:
            await asyncio.sleep(min(60.0, self.idle_seconds / 4))
            self.end_idle(time.monotonic())

    def end_idle(self, now: float) -> None:
        """End sessions without recent calls, because their agents may be dead. Count them as infrastructure losses."""
        for name, record in list(self._live.items()):
            idle_seconds = now - record.called
            if idle_seconds > self.idle_seconds and not record.session.sampling:
                error = f"nobody called the session for {idle_seconds / 60:.0f} minutes"
                logger.warning("session %s: %s", name, error)
                try:
                    self._end(name, record, end="failed", success=None, error=error, abandoned=True)
                except Exception as problem:  # a full disk or a bad session must not end the watch
                    logger.error("session %s cannot be ended, and will be tried again: %s", name, problem)
                else:
                    self.abandoned += 1

    def _end(self, name: str, record: Record, **values: Any) -> None:
        record.log("end", **values)
        _finish(record.episode, values)
        self._write(name, record, abandoned=values.get("abandoned", False))
        record.journal.unlink()

    def _add(self, name: str, header: Mapping[str, Any]) -> Record:
        fields = {key: value for key, value in header.items() if key != "kind"}
        episode = Episode(**fields)
        self._reserve_place(name, episode.group, episode.member)
        session = RolloutSession(name, self.sampler, on_reply=lambda replied: record.add_reply(replied))
        record = Record(session, episode, self.folder / "sessions" / f"{name}.jsonl")
        self._live[name] = record
        return record

    def _reserve_place(self, name: str, group: int, member: int) -> None:
        """Mark a group and its member as used, so that neither number is assigned again."""
        self._groups = max(self._groups, group + 1)
        self._members[group, member] = name

    def _write(self, name: str, record: Record, *, abandoned: bool) -> None:
        """Write the episode to its group's file. A copy that was written before the gateway was killed is replaced."""
        episode = record.episode
        file = self.folder / "episodes" / f"group-{episode.group:08d}.jsonl"
        try:
            siblings = list(read_episodes(file)) if file.exists() else []
        except BadEpisodes as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None  # the disk's failure does not make the file bad
            siblings, backup = [], file.with_suffix(".unreadable")
            logger.warning("%s; its group begins a new file. Kept as %s", error, backup.name)
            file.replace(backup)
        members = [sibling for sibling in siblings if sibling.member != episode.member] + [episode]
        write_episodes(file, sorted(members, key=lambda sibling: sibling.member))
        record.session.close("it was ended")
        del self._live[name]
        self._over[name] = None if abandoned else episode.total_reward
        # This file remembers that the name and the place were used.
        ids = {"group": episode.group, "member": episode.member}
        facts = {**ids, "reward": episode.total_reward, "abandoned": abandoned}
        write_atomic(record.journal.with_suffix(".over"), json.dumps(facts))


def _finish(episode: Episode, values: Mapping[str, Any]) -> None:
    episode.end = cast(End, values["end"])
    episode.success, episode.error = values["success"], values["error"]
