"""Code shared by the adapters: opening of episodes, parsing of replies into actions, and metrics."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import random
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starpod.client.answers import split_actions
from starpod.client.observation import Limits, Transition
from starpod.client.session import Session
from starpod.client.sync import SyncFleet
from starpod.v1.values import Action

T = TypeVar("T")

MOST_ACTIONS = 256
"""Maximum number of actions that are read from one reply; further actions are dropped. Servers refuse longer lists, and
a model that repeats an action without end should play a bad turn instead of causing an error."""

MISREAD = "Your reply held no valid action."


@dataclass(frozen=True, slots=True)
class Reader:
    """Parser of replies. It splits the text between the last `<tag>` and `</tag>` at the separator, except inside JSON
    objects. Subclass it for another format."""

    tag: str | None = "answer"
    """Name of the tag; None uses the whole reply."""
    separator: str | None = "||"
    """Separator between actions; None reads one action."""

    def read(self, reply: str) -> Sequence[Action]:
        """Return the actions in a reply, in order. A reply without any is a turn with no actions, not an error."""
        # Unpaired surrogates, which JSON can contain, cannot be sent as text.
        answer = reply.encode(errors="replace").decode()
        if self.tag is not None:
            before, _, _ = answer.rpartition(f"</{self.tag}>")
            _, opening_tag, answer = before.rpartition(f"<{self.tag}>")
            if not opening_tag:
                return []
        pieces = [answer] if self.separator is None else split_actions(answer, self.separator)
        return [piece.strip() for piece in pieces if piece.strip()][:MOST_ACTIONS]

    def ask(self, most: int) -> str:
        """Return the sentence that describes the format to the model.

        Args:
            most: maximum number of actions in a turn; 0 means no limit.
        """
        allows_several = self.separator is not None and most != 1
        form = f"action {self.separator} action" if allows_several else "action"
        number = f"up to {most} actions" if most else "one action or several"
        content = f"{number}, separated by {self.separator}" if allows_several else "one action"
        if self.tag is None:
            return f"Reply with {content}, and nothing else."
        return f"Reply with {content}, in this form: <{self.tag}> {form} </{self.tag}>"


@dataclass(frozen=True)
class Setting:
    """The environment to play, its servers, and the format of replies."""

    addresses: str | Sequence[str]
    """Addresses of servers, as in Fleet."""
    environment_id: str
    options: Mapping[str, Any] | None = None
    """Options of the environment. A row of the data set can override them."""
    limits: Limits | None = None
    version: str = ""
    reader: Reader = Reader()
    fleet: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of Fleet, such as `token`, `tls` and `patience`."""

    def shared_fleet(self) -> SyncFleet:
        """Return the process's fleet for these servers. It is made on first use and closed when the process ends."""
        addresses = (self.addresses,) if isinstance(self.addresses, str) else tuple(self.addresses)
        key = (addresses, *sorted(self.fleet.items()))
        with _lock:
            if key not in _fleets:
                _fleets[key] = SyncFleet(list(addresses), **self.fleet)
                atexit.register(_fleets[key].close)
            return _fleets[key]

    def opening(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of Fleet.open for a row of a data set.

        Args:
            row: a mapping. Its key `seed` determines the start, which the members of a group have in common, because
                they share the row. `dynamics_seed` (optional) determines the random transitions. `options` (optional)
                is a mapping or its JSON text. Options that are None are ignored, because data sets fill in missing
                keys with None.

        Raises:
            ValueError: the row has no seed.
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

    async def open(self, row: Mapping[str, Any]) -> TextEpisode:
        """Open the episode of a row. A missing `dynamics_seed` is drawn from `random`. Any event loop may call this."""
        # A derived dynamics_seed would be equal for all members, because each is opened as the first of its own group.
        arguments = {"dynamics_seed": random.getrandbits(63), **self.opening(row)}
        (session,) = await self.on_fleet(self.shared_fleet().fleet.open(**arguments))
        return TextEpisode(session, self.reader)

    async def on_fleet(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the fleet's event loop, and await its result on the caller's event loop."""
        loop = self.shared_fleet().fleet.loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))

    async def play(self, episode: TextEpisode, reply: str) -> str:
        """Play a reply as one turn and return the text that the model sees next. Infrastructure errors are raised."""
        return episode.take(await self.on_fleet(episode.session.step(episode.reader.read(reply))))

    async def close(self, episode: TextEpisode) -> None:
        await self.on_fleet(episode.session.close())


class TextEpisode:
    """An episode that a language model plays.

    Attributes:
        first: the text before the model's first reply: instructions, format of a reply, first observation.
        rewards: the reward of each turn.
        reward: the sum of `rewards`.
    """

    def __init__(self, session: Session, reader: Reader) -> None:
        self.session = session
        self.reader = reader
        format_text = reader.ask(session.limits.max_actions_per_turn or 0)
        self.first = "\n\n".join(text for text in (session.instructions, format_text, session.observation.text) if text)
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
        """Record a turn and return the text that the model sees next."""
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
        """Return metrics of the episode: turns, turns without a valid action, success if known, reward components."""
        metrics = {"turns": float(len(self.rewards)), "misread_turns": float(self._misread)}
        if self._last is not None:
            metrics["truncated"] = float(self._last.truncated)
            if self._last.success is not None:
                metrics["success"] = float(self._last.success)
        return metrics | {f"reward/{name}": value for name, value in self._parts.items()}


def converse(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return copies of the messages, with the text added at the end.

    The text is appended to the last message if that is a user message. Otherwise it becomes a new user message.
    """
    copies = [dict(message) for message in messages]
    if copies and copies[-1]["role"] == "user":
        content = copies[-1]["content"]
        if isinstance(content, str):
            copies[-1]["content"] = f"{content}\n\n{text}" if content else text
        else:  # content blocks
            copies[-1]["content"] = [*content, {"type": "text", "text": text}]
        return copies
    return [*copies, {"role": "user", "content": text}]


def break_tokens(text: str, tokenizer: Any) -> str:
    """Return an environment's text with an invisible character inside each special token that it spells.

    Chat templates insert texts as they are, so a web page with "<|im_end|>" could end the user's turn.

    Args:
        tokenizer: tokenizer of transformers, or a processor with one.
    """
    added_tokens = getattr(tokenizer, "tokenizer", tokenizer).added_tokens_decoder.values()
    tokens = sorted((str(token) for token in added_tokens if token.special and len(str(token)) > 1), key=len)
    return _pattern(tuple(reversed(tokens))).sub(lambda match: f"{match[0][0]}\N{WORD JOINER}{match[0][1:]}", text)


@functools.lru_cache(maxsize=8)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


_fleets: dict[Any, SyncFleet] = {}
_lock = threading.Lock()
