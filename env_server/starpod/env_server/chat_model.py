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
    """A model behind an API for chat completions like OpenAI's, for example vLLM or `starpod gateway`."""

    url: str
    """Base address with the API's version, for example http://127.0.0.1:8091/v1."""
    name: str = "policy"
    """Name of the model."""
    key: str = "starpod"
    """API key."""
    seconds: float = 60.0
    """Timeout of one completion, in seconds."""
    attempts: int = 3
    """Maximum number of completions to request until one makes sense."""

    @classmethod
    def from_variables(cls, prefix: str) -> ChatModel:
        """Return the model that the environment variables PREFIX_URL, PREFIX_MODEL and PREFIX_KEY describe.

        Call it in `prepare`. The address must not be an option: callers must not choose which hosts a server calls.

        Raises:
            Unavailable: PREFIX_URL is not set.
        """
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
        """Ask the model, as an effect of the environment (see Environment.effect), and return what `read` returns.

        Args:
            environment: the environment that asks. It records the reply.
            messages: the conversation, as dictionaries with `role` and `content`.
            read: converts the reply's text, without reasoning, to a JSON value. It raises ValueError if the text makes
                no sense, and the model is asked again.
            parameters: further parameters of the completion, such as `max_tokens`.

        Raises:
            ValueError: none of `attempts` replies made sense.
        """
        request = {"model": self.name, "messages": [dict(message) for message in messages], **parameters}
        return environment.effect(request, lambda: self._sample(request, read))

    def _sample(self, request: Mapping[str, Any], read: Callable[[str], Any]) -> Any:
        read_error = ValueError(f"attempts is {self.attempts}: allow at least 1")
        for seed in range(self.attempts):
            message = self._complete({"seed": seed, **request})
            try:
                return read(_spoken(message))
            except ValueError as error:
                last_reply = repr(message.get("content"))[:200]
                read_error = ValueError(f"{error} (after {self.attempts} replies, the last of them {last_reply})")
        raise read_error

    def _complete(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        call = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(request).encode(), headers)
        with urllib.request.urlopen(call, timeout=self.seconds) as reply:
            message = json.load(reply)["choices"][0]["message"]
            if not isinstance(message, dict):
                raise ValueError(f"the model's reply has no message: {str(message)[:100]!r}")
            return message


_THOUGHT = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)


def _spoken(message: Mapping[str, Any]) -> str:
    """Return the text of a reply without its reasoning. Raises ValueError if no text is left."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    text = _THOUGHT.sub("", content, count=1).strip() if isinstance(content, str) else ""
    if not text:
        raise ValueError("the model's reply has no text")
    return text
