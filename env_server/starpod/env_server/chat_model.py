"""A language model that an environment asks: as a judge, or as a simulated user."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starpod.env_server.environment import Environment, Unavailable


@dataclass(frozen=True)
class ChatModel:
    """A model behind OpenAI's chat completions, as vLLM, `starpod gateway` and others serve them.

    url: where they are, with the API's version, such as http://127.0.0.1:8091/v1. name: the model's.
    key: its API key. seconds: that a reply may take. attempts: samples until one makes sense.
    """

    url: str
    name: str = "policy"
    key: str = "starpod"
    seconds: float = 60.0
    attempts: int = 3

    @classmethod
    def from_variables(cls, prefix: str) -> ChatModel:
        """The model that PREFIX_URL, PREFIX_MODEL and PREFIX_KEY name: for `prepare`, because callers must not choose
        where a server calls. Raises Unavailable without a URL."""
        url = os.environ.get(f"{prefix}_URL", "")
        if not url.startswith(("http://", "https://")):
            raise Unavailable(f"it asks a model: set {prefix}_URL to its API, such as http://127.0.0.1:8091/v1")
        return cls(url, os.environ.get(f"{prefix}_MODEL", cls.name), os.environ.get(f"{prefix}_KEY", cls.key))

    def ask(
        self,
        environment: Environment,
        messages: Sequence[Mapping[str, str]],
        *,
        read: Callable[[str], Any] = str,
        **parameters: Any,
    ) -> Any:
        """What the model replies, as an effect of the environment: recorded, and never asked again.

        read: understands the text, which comes without the model's reasoning, and raises ValueError if it makes no
            sense; returns a JSON value. A reply without text is sampled again, too.
        parameters: of the completion, such as `max_tokens`.
        """
        request = {"model": self.name, "messages": [dict(message) for message in messages], **parameters}
        return environment.effect(request, lambda: self._sample(request, read))

    def _sample(self, request: Mapping[str, Any], read: Callable[[str], Any]) -> Any:
        nonsense: ValueError | None = None
        for seed in range(self.attempts):
            message = self._complete({"seed": seed, **request})
            try:
                return read(_spoken(message))
            except ValueError as error:
                last = repr(message.get("content"))[:200]
                nonsense = ValueError(f"{error} (after {self.attempts} replies, the last of them {last})")
        assert nonsense is not None
        raise nonsense

    def _complete(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        call = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(request).encode(), headers)
        with urllib.request.urlopen(call, timeout=self.seconds) as reply:
            message = json.load(reply)["choices"][0]["message"]
            if not isinstance(message, dict):
                raise ValueError(f"the model's reply holds no message but {str(message)[:100]!r}")
            return message


_THOUGHT = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)


def _spoken(message: Mapping[str, Any]) -> str:
    """Return the text of a reply without its reasoning. Raises ValueError if it says nothing."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    text = _THOUGHT.sub("", content, count=1).strip() if isinstance(content, str) else ""
    if not text:
        raise ValueError("the model's reply holds no text to say")
    return text
