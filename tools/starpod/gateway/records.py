"""Sessions of a gateway that runs by itself: begun, rewarded and ended by their callers, and written as episodes.

Each session has a journal, a line for each event, written before anybody hears of it; a gateway that was killed goes on
from the journals. A session that is over becomes a line in the file of its group, in the trainer's format, and is
written by replacing that file whole, so that ending it twice leaves one episode.
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
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast, get_args

from starpod.gateway.requests import Refused, bad_request
from starpod.gateway.session import NAME, Replied, Sampler, Session
from starpod.trainer.data.episode import EXTERNAL, End, Episode
from starpod.trainer.data.files import read_episodes, write_episodes

logger = logging.getLogger(__name__)

MOST_SESSIONS = 1024
"""Sessions at once, by default."""


@dataclass(eq=False)
class Record:
    """One session's episode, as far as it has come. rewarded: keys of the rewards that were given.

    called: when it was called last, by `time.monotonic`.
    """

    session: Session
    episode: Episode
    journal: Path
    rewarded: set[str] = field(default_factory=set)
    called: float = field(default_factory=time.monotonic)

    def log(self, kind: str, **values: Any) -> None:
        """Raises OSError, and leaves the journal as it was."""
        line = json.dumps({"kind": kind, **values}, ensure_ascii=False) + "\n"
        before = self.journal.stat().st_size if self.journal.exists() else 0
        try:
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            # A full disk takes a part of a line, to which the next one would be joined.
            with suppress(OSError):
                os.truncate(self.journal, before)
            raise

    def took(self, replied: Replied) -> None:
        self.called = time.monotonic()
        self.log("reply", **replied.to_json())
        self._note(replied)

    def _note(self, replied: Replied) -> None:
        turn = replied.turn
        turn.parts = {"environment": 0.0}
        self.episode.turns.append(turn)

    def reward(self, value: float, key: str) -> None:
        """Add a reward to the last reply's turn; once for each `key`."""
        if key and key in self.rewarded:
            return
        if not self.episode.turns:
            raise Refused(HTTPStatus.CONFLICT, "no_reply", "there is no reply yet that a reward could be for")
        self.log("reward", value=value, key=key)
        self._pay(value, key)

    def _pay(self, value: float, key: str) -> None:
        turn = self.episode.turns[-1]
        turn.parts["environment"] += value
        turn.reward += value
        self.rewarded.add(key)

    def replay(self, values: dict[str, Any]) -> None:
        """Take over a line of the journal."""
        match values.pop("kind"):
            case "reply":
                replied = Replied.from_json(values)
                self.session.restore(replied)
                self._note(replied)
            case "reward":
                self._pay(values["value"], values["key"])
            case "end":
                _finish(self.episode, values)


class Records:
    """The sessions of a gateway, in a folder: `sessions` holds their journals, `episodes` the groups' files.

    Each session is one member of a group, and no other session ever is.

    begins_unknown: whether an API key that nobody has begun a session for begins one. Use `restore` first.
    idle_seconds: after so long without a call a session is ended, as failed. abandoned: how many were.
    """

    def __init__(
        self,
        sampler: Sampler,
        folder: Path,
        *,
        most: int = MOST_SESSIONS,
        begins_unknown: bool = True,
        idle_seconds: float = math.inf,
    ) -> None:
        self.sampler = sampler
        self.folder = folder
        self.most = most
        self.begins_unknown = begins_unknown
        self.idle_seconds = idle_seconds
        self.abandoned = 0
        self._live: dict[str, Record] = {}
        self._over: dict[str, float] = {}
        self._groups = 0
        self._members: dict[tuple[int, int], str] = {}
        (folder / "sessions").mkdir(parents=True, exist_ok=True)

    def restore(self) -> None:
        """Take the journals over. A last line that is cut was heard of by nobody, and is dropped.

        A session with another line that cannot be read ends as failed, and its journal is kept aside.
        """
        sessions = self.folder / "sessions"
        for over in sessions.glob("*.over"):
            left = json.loads(over.read_text(encoding="utf-8"))
            self._over[over.stem] = left["reward"]
            self.abandoned += left.get("abandoned", False)
            self._hold(over.stem, left["group"], left["member"])
        for unreadable in sessions.glob("*.unreadable"):
            self._over.setdefault(unreadable.stem, 0.0)
        for journal in sorted(sessions.glob("*.jsonl")):
            self._restore(journal)

    def _restore(self, journal: Path) -> None:
        name, data = journal.stem, journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(journal, whole)
        if not whole:
            journal.unlink()
            return
        record: Record | None = None
        values: dict[str, Any] = {}
        number = 1
        try:
            for line in data[:whole].splitlines():
                values = json.loads(line)
                if record is None:
                    record = self._add(name, values)
                else:
                    record.replay(values)
                number += 1
        except Exception as error:  # whatever is wrong with it, the other sessions go on
            kept = journal.with_suffix(".unreadable")
            logger.warning("%s, line %d: %r; its session ends as failed. Kept as %s", journal, number, error, kept.name)
            if record is None:
                self._over[name] = 0.0
            else:
                problem = f"line {number} of the session's journal cannot be read"
                _finish(record.episode, {"end": "failed", "success": None, "error": problem})
                self._write(name, record, abandoned=False)
            journal.replace(kept)
            return
        if record is not None and record.episode.end:
            abandoned = values.get("abandoned", False)
            self.abandoned += abandoned
            self._write(name, record, abandoned=abandoned)
            journal.unlink()

    def find(self, name: str) -> Session:
        """The session of an API key. Raises Refused."""
        if name in self._live or name in self._over:
            return self.record(name).session
        if not self.begins_unknown:
            raise Refused(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the API key names no session: begin one first")
        return self.begin(name, {}).session

    def begin(self, name: str, values: Mapping[str, Any]) -> Record:
        """A session; one that was begun before as it is. Raises Refused, and OSError.

        values: fields of its episode. Without a group it gets one of its own, without a member the group's next one.
        """
        name = name or f"s-{uuid.uuid4().hex}"
        if not NAME.fullmatch(name):
            raise bad_request(
                "a session's name has letters, digits, `.`, `_` and `-`, at most 128, a letter or digit first"
            )
        if name in self._live:
            return self.record(name)
        if name in self._over:
            raise Refused(HTTPStatus.GONE, "session_over", f"the session {name} is over; begin one of another name")
        if len(self._live) >= self.most:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS, "too_many_sessions", f"{self.most} sessions run: end some first"
            )
        group = values.get("group", self._groups)
        member = values.get("member")
        if member is None:
            member = next(free for free in itertools.count() if (group, free) not in self._members)
        if (holder := self._members.get((group, member))) is not None:
            taken = f"member {member} of group {group} is the session {holder}"
            raise Refused(HTTPStatus.CONFLICT, "member_taken", f"{taken}: give another, or none for the next free one")
        begun = {"environment": EXTERNAL, **values, "group": group, "member": member}
        record = self._add(name, begun)
        try:
            record.log("begin", **begun)
        except OSError:
            del self._live[name], self._members[group, member]
            raise
        return record

    def record(self, name: str) -> Record:
        """A live session's record, which counts as a call of it. Raises Refused."""
        if name in self._over:
            raise Refused(HTTPStatus.GONE, "session_over", f"the session {name} is over")
        if (record := self._live.get(name)) is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no_session", f"there is no session {name!r} that goes on")
        record.called = time.monotonic()
        return record

    def end(self, name: str, values: Mapping[str, Any]) -> float:
        """End a session, writes its episode, returns the return. One that is over stays as it is. Raises Refused."""
        if (over := self._over.get(name)) is not None:
            return over
        record = self.record(name)
        end = str(values.get("end") or "terminal")
        if end not in get_args(End):
            raise bad_request(f"`end` is {end[:40]!r}; use one of {', '.join(filter(None, get_args(End)))}")
        self._end(name, record, end=end, success=values.get("success"), error=str(values.get("error") or ""))
        return record.episode.total_reward

    def counts(self) -> dict[str, int]:
        """How many sessions go on, and may; how many are over, and were abandoned among them."""
        return {"live": len(self._live), "most": self.most, "over": len(self._over), "abandoned": self.abandoned}

    async def watch(self) -> None:
        """End what nobody calls any more, until it is cancelled."""
        while True:
            await asyncio.sleep(min(60.0, self.idle_seconds / 4))
            self.end_idle(time.monotonic())

    def end_idle(self, now: float) -> None:
        """End the sessions that were called too long ago, as lost by the infrastructure: their agents may be dead."""
        for name, record in list(self._live.items()):
            idle = now - record.called
            if idle > self.idle_seconds and not record.session.sampling:
                error = f"nobody called the session for {idle / 60:.0f} minutes"
                logger.warning("session %s: %s", name, error)
                self.abandoned += 1
                self._end(name, record, end="failed", success=None, error=error, abandoned=True)

    def _end(self, name: str, record: Record, **values: Any) -> None:
        record.log("end", **values)
        _finish(record.episode, values)
        self._write(name, record, abandoned=values.get("abandoned", False))
        record.journal.unlink()

    def _add(self, name: str, begun: Mapping[str, Any]) -> Record:
        fields = {key: value for key, value in begun.items() if key != "kind"}
        episode = Episode(**fields)
        self._hold(name, episode.group, episode.member)
        session = Session(name, self.sampler, took=lambda replied: record.took(replied))
        record = Record(session, episode, self.folder / "sessions" / f"{name}.jsonl")
        self._live[name] = record
        return record

    def _hold(self, name: str, group: int, member: int) -> None:
        """The group's number is not given anew, nor its member."""
        self._groups = max(self._groups, group + 1)
        self._members[group, member] = name

    def _write(self, name: str, record: Record, *, abandoned: bool) -> None:
        """Put the episode into its group's file, in its own place where a kill came after it was written."""
        episode = record.episode
        file = self.folder / "episodes" / f"group-{episode.group:08d}.jsonl"
        others = list(read_episodes(file)) if file.exists() else []
        members = [each for each in others if each.member != episode.member] + [episode]
        write_episodes(file, sorted(members, key=lambda each: each.member))
        record.session.close("it was ended")
        del self._live[name]
        self._over[name] = episode.total_reward
        # Neither the name is given anew, nor its place.
        place = {"group": episode.group, "member": episode.member}
        left = {**place, "reward": episode.total_reward, "abandoned": abandoned}
        over = record.journal.with_suffix(".over")
        over.with_suffix(".tmp").write_text(json.dumps(left), encoding="utf-8")
        over.with_suffix(".tmp").replace(over)


def _finish(episode: Episode, values: Mapping[str, Any]) -> None:
    episode.end = cast(End, values["end"])
    episode.success, episode.error = values["success"], values["error"]
