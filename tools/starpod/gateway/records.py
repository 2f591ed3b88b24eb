"""Sessions of a gateway that runs by itself: begun, rewarded and ended by their callers, and written as episodes.

Each session has a journal, a line for each event, written before anybody hears of it; a gateway that was killed goes on
from the journals. A session that is over becomes a line in the file of its group, in the trainer's format, and is
written by replacing that file whole, so that ending it twice leaves one episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping
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
        line = json.dumps({"kind": kind, **values}, ensure_ascii=False)
        with self.journal.open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(line + "\n")

    def took(self, replied: Replied) -> None:
        self.called = time.monotonic()
        self.log("reply", **replied.to_json())
        self._note(replied)

    def _note(self, replied: Replied) -> None:
        turn = replied.turn
        turn.parts = {"environment": 0.0}
        self.episode.turns.append(turn)

    def reward(self, value: float, key: str) -> None:
        """Adds a reward to the last reply's turn; once for each `key`."""
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
        """Takes over a line of the journal."""
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
        (folder / "sessions").mkdir(parents=True, exist_ok=True)

    def restore(self) -> None:
        """Takes the journals over. A last line that is cut was heard of by nobody, and is dropped."""
        for over in (self.folder / "sessions").glob("*.over"):
            left = json.loads(over.read_text(encoding="utf-8"))
            self._over[over.stem] = left["reward"]
            self.abandoned += left.get("abandoned", False)
            self._groups = max(self._groups, left["group"] + 1)
        for journal in sorted((self.folder / "sessions").glob("*.jsonl")):
            data = journal.read_bytes()
            if (whole := data.rfind(b"\n") + 1) < len(data):
                with journal.open("r+b") as file:
                    file.truncate(whole)
            lines = [json.loads(line) for line in data[:whole].splitlines()]
            if not lines:
                journal.unlink()
                continue
            begun = lines.pop(0)
            record = self._add(journal.stem, begun)
            for values in lines:
                record.replay(values)
            if record.episode.end:
                abandoned = lines[-1].get("abandoned", False)
                self.abandoned += abandoned
                self._write(journal.stem, record, abandoned=abandoned)

    def find(self, name: str) -> Session:
        """The session of an API key. Raises Refused."""
        if name in self._live:
            return self.record(name).session
        if name in self._over:
            raise Refused(HTTPStatus.GONE, "session_over", f"the session {name} is over")
        if not self.begins_unknown:
            raise Refused(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the API key names no session: begin one first")
        return self.begin(name, {}).session

    def begin(self, name: str, values: Mapping[str, Any]) -> Record:
        """A session; one that was begun before as it is. values: fields of its episode. Raises Refused."""
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
        begun = {"group": self._groups, "member": 0, "environment": EXTERNAL, **values}
        record = self._add(name, begun)
        record.log("begin", **begun)
        return record

    def record(self, name: str) -> Record:
        """A live session's record, which counts as a call of it. Raises Refused."""
        if (record := self._live.get(name)) is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no_session", f"there is no session {name!r} that goes on")
        record.called = time.monotonic()
        return record

    def end(self, name: str, values: Mapping[str, Any]) -> float:
        """Ends a session, writes its episode, returns the return. One that is over stays as it is. Raises Refused."""
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
        """Ends what nobody calls any more, until it is cancelled."""
        while True:
            await asyncio.sleep(min(60.0, self.idle_seconds / 4))
            self.end_idle(time.monotonic())

    def end_idle(self, now: float) -> None:
        """Ends the sessions that were called too long ago, as lost by the infrastructure: their agents may be dead."""
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

    def _add(self, name: str, begun: Mapping[str, Any]) -> Record:
        fields = {key: value for key, value in begun.items() if key != "kind"}
        episode = Episode(**fields)
        self._groups = max(self._groups, episode.group + 1)
        session = Session(name, self.sampler, took=lambda replied: record.took(replied))
        record = Record(session, episode, self.folder / "sessions" / f"{name}.jsonl")
        self._live[name] = record
        return record

    def _write(self, name: str, record: Record, *, abandoned: bool) -> None:
        """Puts the episode into its group's file, in the place of the same member."""
        episode = record.episode
        file = self.folder / "episodes" / f"group-{episode.group:08d}.jsonl"
        others = list(read_episodes(file)) if file.exists() else []
        members = [each for each in others if each.member != episode.member] + [episode]
        write_episodes(file, sorted(members, key=lambda each: each.member))
        record.session.close("it was ended")
        del self._live[name]
        self._over[name] = episode.total_reward
        # The name is not given anew, nor the group's number.
        left = {"group": episode.group, "reward": episode.total_reward, "abandoned": abandoned}
        over = record.journal.with_suffix(".over")
        over.with_suffix(".tmp").write_text(json.dumps(left), encoding="utf-8")
        over.with_suffix(".tmp").replace(over)
        record.journal.unlink()


def _finish(episode: Episode, values: Mapping[str, Any]) -> None:
    episode.end = cast(End, values["end"])
    episode.success, episode.error = values["success"], values["error"]
