"""A language model that an environment asks: as a judge, or as a simulated user."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starpod.env_server.authoring.environment import Busy, Environment, Unavailable
from starpod.v1.untrusted import read_completion, wait_seconds


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
                no sense, and the model is asked again, as it is if its reply is malformed or was cut by `max_tokens`.
            parameters: further parameters of the completion, such as `max_tokens`.

        Raises:
            EffectFailed: the API does not answer or is overloaded.
            UselessReply: none of `attempts` replies made sense, or the API refused the request.
        """
        request = {"model": self.name, "messages": [dict(message) for message in messages], **parameters}
        return environment.effect(request, lambda: self._sample(request, read))

    def _sample(self, request: Mapping[str, Any], read: Callable[[str], Any]) -> Any:
        problem = f"attempts is {self.attempts}: allow at least 1"
        for seed in range(self.attempts):
            body = self._complete({"seed": seed, **request})
            try:
                value = read(_spoken(body))
                json.dumps(value, allow_nan=False)
                return value
            except ValueError as error:
                problem = f"{error} (after {self.attempts} replies, the last of them {body[:200]!r})"
        raise ValueError(f"{self.url}: {problem}")

    def _complete(self, request: Mapping[str, Any]) -> bytes:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        call = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(request).encode(), headers)
        try:
            with urllib.request.urlopen(call, timeout=self.seconds) as reply:
                body: bytes = reply.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                problem = f"{self.url}: {error}: {error.read(200).decode(errors='replace')}"
            if error.code < 500 and error.code not in _PASSING:
                raise ValueError(problem) from error
            raise Busy(problem, wait_seconds(error.headers.get("Retry-After", ""))) from error
        except (OSError, http.client.HTTPException) as error:
            raise Busy(f"{self.url}: {error}") from error


_PASSING = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
_WHOLE = ("stop", "eos", "eos_token", "stop_sequence", None)
"""Finish reasons of a reply that says all that the model said."""
_THOUGHT = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)


def _spoken(body: bytes) -> str:
    """Return the text of a reply without its reasoning. Raises ValueError if no text is left, or if it is cut off."""
    completion = read_completion(body)
    if completion.finish not in _WHOLE:
        raise ValueError(
            f"the model's reply ended with {completion.finish!r}, so it is not whole; perhaps raise max_tokens"
        )
    if not (text := _THOUGHT.sub("", completion.text, count=1).strip()):
        raise ValueError("the model's reply has no text")
    return text
