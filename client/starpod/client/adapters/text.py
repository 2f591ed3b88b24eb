"""What the adapters share: where the environment is, how replies become actions, and the score of an episode."""

from __future__ import annotations

import asyncio
import atexit
import json
import random
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starpod.client.answers import split_actions
from starpod.client.observation import Action, Limits, Transition
from starpod.client.session import Session
from starpod.client.sync import SyncFleet

T = TypeVar("T")

MOST_ACTIONS = 256
"""Of one reply: servers refuse longer lists, and a reply that repeats itself is a bad reply, not a failure."""

MISREAD = "Your reply held no valid action."


@dataclass(frozen=True, slots=True)
class Reader:
    """How a reply becomes actions: what stands between the last `<tag>` and its `</tag>`, cut at the separator
    (but not inside a JSON object).

    tag: None takes the whole reply. separator: None makes it one action. Subclass it for another form.
    """

    tag: str | None = "answer"
    separator: str | None = "||"

    def read(self, reply: str) -> Sequence[Action]:
        """The actions, in order. None found is a turn without an action, never an error."""
        # Unpaired surrogates, which JSON can spell, cannot travel as text.
        answer = reply.encode(errors="replace").decode()
        if self.tag is not None:
            before, _, _ = answer.rpartition(f"</{self.tag}>")
            _, opening, answer = before.rpartition(f"<{self.tag}>")
            if not opening:
                return []
        pieces = [answer] if self.separator is None else split_actions(answer, self.separator)
        return [piece.strip() for piece in pieces if piece.strip()][:MOST_ACTIONS]

    def ask(self, most: int) -> str:
        """The sentence that tells the model this form. most: actions in a turn; 0 means no limit."""
        several = self.separator is not None and most != 1
        form = f"action {self.separator} action" if several else "action"
        many = f"up to {most} actions" if most else "one action or several"
        what = f"{many}, separated by {self.separator}" if several else "one action"
        if self.tag is None:
            return f"Reply with {what}, and nothing else."
        return f"Reply with {what}, in this form: <{self.tag}> {form} </{self.tag}>"


@dataclass(frozen=True)
class Setting:
    """Which environment is played, where, and how a reply is read.

    addresses: of servers, as in Fleet. fleet: further arguments of Fleet (token, tls, patience).
    options, limits, version: as in Fleet.open. A row of the data set may override options.
    """

    addresses: str | Sequence[str]
    environment_id: str
    options: Mapping[str, Any] | None = None
    limits: Limits | None = None
    version: str = ""
    reader: Reader = Reader()
    fleet: Mapping[str, Any] = field(default_factory=dict)

    def shared_fleet(self) -> SyncFleet:
        """The fleet of this process for these servers: made on first use, closed when the process ends."""
        addresses = (self.addresses,) if isinstance(self.addresses, str) else tuple(self.addresses)
        key = (addresses, *sorted(self.fleet.items()))
        with _lock:
            if key not in _fleets:
                _fleets[key] = SyncFleet(list(addresses), **self.fleet)
                atexit.register(_fleets[key].close)
            return _fleets[key]

    def opening(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of Fleet.open for a row of a data set.

        seed: the start; the members of a group have the same one, because they have the same row.
        dynamics_seed: the luck, if it is to be the same each time.
        options: a mapping, or JSON text; None in it stands for absent, as data sets fill up missing keys.
        """
        if row.get("seed") is None:
            raise ValueError(
                "No seed: give every row of the data set a `seed`, so that the members of a group start from one state."
            )
        options = row.get("options") or {}
        if isinstance(options, str):
            options = json.loads(options)
        options = {**(self.options or {}), **{key: value for key, value in options.items() if value is not None}}
        arguments = {
            "environment_id": self.environment_id,
            "seed": int(row["seed"]),
            "options": options or None,
            "limits": self.limits,
            "version": self.version,
        }
        if row.get("dynamics_seed") is not None:
            arguments["dynamics_seed"] = int(row["dynamics_seed"])
        return arguments

    async def open(self, row: Mapping[str, Any]) -> Episode:
        """The episode of a row, from any event loop. Luck that the row does not fix is drawn from `random`."""
        # Opened one by one every session is the first of its group: derived luck would be the same for all.
        arguments = {"dynamics_seed": random.getrandbits(63), **self.opening(row)}
        (session,) = await self.on_fleet(self.shared_fleet().fleet.open(**arguments))
        return Episode(session, self.reader)

    async def on_fleet(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a call on a fleet or session, whose event loop is another one than the caller's."""
        loop = self.shared_fleet().fleet.loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))

    async def play(self, episode: Episode, reply: str) -> str:
        """Plays a reply as one turn; what the model sees next. An error of the infrastructure is raised."""
        return episode.take(await self.on_fleet(episode.session.step(episode.reader.read(reply))))

    async def close(self, episode: Episode) -> None:
        await self.on_fleet(episode.session.close())


class Episode:
    """An episode that is played by text.

    first: what the model is shown before its first reply: instructions, form of a reply, first observation.
    rewards: of each turn. reward: their sum.
    """

    def __init__(self, session: Session, reader: Reader) -> None:
        self.session = session
        self.reader = reader
        ask = reader.ask(session.limits.max_actions_per_turn or 0)
        self.first = "\n\n".join(text for text in (session.instructions, ask, session.observation.text) if text)
        self.rewards: list[float] = []
        self._misread = 0
        self._parts: dict[str, float] = {}
        self._last: Transition | None = None

    @property
    def done(self) -> bool:
        return self.session.done

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    def take(self, transition: Transition) -> str:
        """Notes what a turn earned; what the model sees next."""
        self._last = transition
        self.rewards.append(transition.reward)
        for name, value in transition.reward_parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value
        text = transition.observation.text
        if any(outcome.valid for outcome in transition.outcomes):
            return text
        self._misread += 1
        return f"{MISREAD}\n{text}"

    def metrics(self) -> dict[str, float]:
        """Numbers of the episode so far: turns, those without a valid action, success where it is known, parts."""
        metrics = {"turns": float(len(self.rewards)), "misread_turns": float(self._misread)}
        if self._last is not None:
            metrics["truncated"] = float(self._last.truncated)
            if self._last.success is not None:
                metrics["success"] = float(self._last.success)
        return metrics | {f"reward/{name}": value for name, value in self._parts.items()}


def converse(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Copies of the messages with the text at the end of the last one, if that is the user's, else after it."""
    copies = [dict(message) for message in messages]
    if copies and copies[-1]["role"] == "user":
        content = copies[-1]["content"]
        if isinstance(content, str):
            copies[-1]["content"] = f"{content}\n\n{text}" if content else text
        else:  # content blocks
            copies[-1]["content"] = [*content, {"type": "text", "text": text}]
        return copies
    return [*copies, {"role": "user", "content": text}]


_fleets: dict[Any, SyncFleet] = {}
_lock = threading.Lock()
