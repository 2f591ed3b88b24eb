"""Client of a vLLM server: calls that are retried and supervised, and what its replies must have."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import openai

from starpod.client.transport import Backoff
from starpod.trainer.engines.base import EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.piece import Piece
from starpod.trainer.engines.watch import Watch

START = (
    "starpod vllm MODEL, or VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    "--enable-scale-out"
)
LOOK_SECONDS = 5.0
"""Interval in seconds between health checks of a server with pending calls."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 8.0
"""First and longest wait in seconds before a call is retried; each wait is twice as long as the one before."""
_BUSY = (
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
"""Calls during which an engine core does not answer health checks, because it works or waits for other cores."""
LOGPROBS_MODE = "processed_logprobs"
"""The log-probabilities that training needs: those at the sampling temperature."""
_PASSING = (408, 409, 429)
"""Statuses below 500 after which the same call may be retried."""


class VllmServer:
    """Client of one server that retries calls and raises readable errors.

    Failed calls are retried if they are idempotent, as all calls except those of a broadcast are. A call without an
    answer is not repeated: the server either works on it or hangs. Health checks ask the engine core, which answers
    between two steps. The server alone would report itself healthy even if its core hangs.

    Attributes:
        breaks: Number of lost connections.
        known_breaks: Value of `breaks` when the server was last known to be the expected process; -1 if that must be
            checked again.
        instance: Id of that process; "" if the server does not report it.
    """

    def __init__(self, url: str, *, key: str, config: EngineConfig) -> None:
        self.url = url.rstrip("/")
        self.breaks = self.known_breaks = 0
        self.instance = ""
        # Health checks have separate connections, because all others may be busy with replies.
        self._client, self._checks = (
            openai.AsyncOpenAI(base_url=self.url, api_key=key or "none", timeout=timeout, max_retries=0)
            for timeout in (None, config.health_timeout)
        )
        self._retries = config.retries
        self._watch, self._watch_busy = (
            Watch(
                f"the vLLM server at {self.url}",
                interval=LOOK_SECONDS,
                health_check=partial(self._checks.get, question, cast_to=NoneType),
                health_timeout=config.health_timeout,
                reply_timeout=config.timeout,
            )
            for question in ("/is_sleeping", "/health")
        )

    async def close(self) -> None:
        await self._client.close()
        await self._checks.close()

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        session: str = "",
        once: bool = False,
        read: Callable[[Any], Any] | None = None,
        read_events: Callable[[AsyncIterator[Any]], Coroutine[Any, Any, Any]] | None = None,
    ) -> Any:
        """Send a POST request.

        Raises EngineError if it fails, for example because the server has no such path.

        Args:
            session: Session name for a router in front of the servers.
            once: Do not retry, because the call is part of a collective operation.
            read: Converts the decoded JSON reply to the result. It raises ValueError if the reply cannot be used, and
                the call is retried. None ignores the reply.
            read_events: The same for a reply that is a stream of events; None: it is none.
        """
        options: Any = {"params": query or {}}
        if session:
            # A router sends all requests of a session to the server with its cache.
            options["headers"] = {"X-Session-ID": session}

        async def call() -> Any:
            if read_events is None:
                return await _read_json(self._client.post(path, body=body, cast_to=str, options=options), read)
            events = openai.AsyncStream[object]
            stream = self._client.post(path, body=body, cast_to=object, options=options, stream=True, stream_cls=events)
            async with await stream as opened:
                return await read_events(aiter(opened))

        return await self._ask(call, path, 0 if once else self._retries)

    async def get(self, path: str, read: Callable[[Any], Any], query: Mapping[str, str] | None = None) -> Any:
        """Send a GET request and return the result of `read`.

        Args:
            path: Path at the server, such as /health.
            read: Converts the decoded JSON reply. It raises ValueError for a bad reply, and the call is retried.

        Raises:
            EngineError: The request failed, for example because the server has no such path.
        """
        options: Any = {"params": query or {}}
        call = partial(self._client.get, path, cast_to=str, options=options)
        return await self._ask(lambda: _read_json(call(), read), path, self._retries)

    async def info(self) -> ServerInfo:
        """Return the facts of the server's vLLM configuration that matter here."""
        info: ServerInfo = await self.get("/server_info", _read_info, {"config_format": "json"})
        return info

    async def _ask(self, call: Callable[[], Coroutine[Any, Any, Any]], path: str, retries: int) -> Any:
        backoff = Backoff(FIRST_WAIT, LONGEST_WAIT)
        watch = self._watch_busy if path in _BUSY else self._watch
        while True:
            failure: EngineError
            try:
                return await watch.guard(call())
            except json.JSONDecodeError as error:
                failure = EngineError(
                    f"the vLLM server at {self.url} answered {path} with {error.doc[:80]!r}, not with JSON"
                )
            except (ValueError, RecursionError) as error:
                failure = EngineError(f"the vLLM server at {self.url} answered {path} with {error}")
            except openai.NotFoundError:
                raise EngineError(f"the server at {self.url} has no {path}; start it as: {START}") from None
            except openai.APIStatusError as error:
                failure = ServerRefused(error.status_code, f"the vLLM server at {self.url} refused {path}: {error}")
                if error.status_code not in _PASSING and error.status_code < 500:
                    raise failure from error
            except openai.APIConnectionError as error:
                self.breaks += 1
                failure = ServerGone(f"the vLLM server at {self.url} is gone: {error.__cause__ or error}")
            except openai.APIError as error:
                failure = EngineError(f"the vLLM server at {self.url} ended the reply of {path}: {error}")
            if not retries:
                raise failure
            retries -= 1
            await asyncio.sleep(backoff.wait())


async def _read_json(reply: Awaitable[str], read: Callable[[Any], Any] | None) -> Any:
    text = await reply
    return None if read is None else read(json.loads(text))


class ServerGone(EngineError):
    """The server does not accept connections."""


class ServerRefused(EngineError):
    """The server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts that a server reports about itself. `instance` is the id of its process, or "" if it reports none."""

    instance: str
    logprobs_mode: str
    max_length: float


def _read_info(reply: Any) -> ServerInfo:
    match reply:
        case {"vllm_config": dict(config)}:
            model = config.get("model_config") or {}
            if isinstance(model, dict):
                length = model.get("max_model_len", math.inf)
                if type(length) in (int, float):
                    mode = str(model.get("logprobs_mode", LOGPROBS_MODE))
                    return ServerInfo(str(config.get("instance_id", "")), mode, length)
    raise ValueError(f"{reply!r:.200}, which is no configuration of vLLM")


def read_world_size(reply: Any) -> int:
    match reply:
        case {"world_size": int(size)} if size > 0:
            return size
    raise ValueError(f"{reply!r:.200}, which is no number of workers")


def read_piece(reply: Any) -> Piece:
    """Return the tokens of a reply, or of an event of one, as the server sent them. Raises ValueError without them."""
    try:
        (choice,) = reply["choices"]
        places = (choice["logprobs"] or {}).get("content") or ()
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        logprobs = [place["logprob"] for place in places]
        cached_tokens = details.get("cached_tokens") or 0
        return Piece(choice["token_ids"] or [], logprobs, choice["finish_reason"], cached_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{reply!r:.200}, which is no reply of tokens ({error!r})") from error
