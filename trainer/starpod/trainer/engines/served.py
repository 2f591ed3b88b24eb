"""Base class of the engines that sample in other processes or on other machines."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch

from starpod.trainer.configuration.seeds import derive
from starpod.trainer.engines.base import EngineError, EngineLost, EngineStats, Reply, Request, check_prompt
from starpod.trainer.parallel.ranks import Parallel

GRACE_SECONDS = 1.0
"""Time for which `pause` waits for aborted calls to return their tokens. It then cancels the remaining calls."""


ROUNDING = 1e-3
"""Rounding may make a log-probability positive by at most this."""
ABORT = "abort"
"""Finish reason of a reply that a pause cut short."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Result of one call of the server: a reply or a part of it."""

    tokens: list[int]
    logprobs: list[float]
    finish: str = ABORT
    """Reason why it ended: "stop", "length" or ABORT."""
    reused: int = 0
    """Number of prompt tokens that were in the cache."""

    def check(self, request: Request, limit: int, vocabulary: int) -> None:
        """Raise ValueError if this is no possible reply of at most `limit` tokens, because of a value or its type."""
        tokens, logprobs = self.tokens, self.logprobs
        if not isinstance(tokens, list):
            raise ValueError(f"token ids {_short(tokens)}, which are no list")
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(f"the token id {_short(token)}, which is not among the model's {vocabulary} tokens")
        for logprob in logprobs:
            if type(logprob) not in (int, float) or not -sys.float_info.max <= logprob <= ROUNDING:
                raise ValueError(f"the log-probability {_short(logprob)}, which is not a finite number up to 0")
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(tokens)} tokens")
        if len(tokens) > limit:
            raise ValueError(f"{len(tokens)} tokens, although the request's limit is {limit}")
        if not request.stop.isdisjoint(tokens[:-1]):
            raise ValueError("tokens after a stop token")
        has_stopped = bool(tokens) and tokens[-1] in request.stop
        is_possible = {"stop": has_stopped, "length": len(tokens) == limit, ABORT: True}
        if not isinstance(self.finish, str) or not is_possible.get(self.finish, False):
            ending = "with" if has_stopped else "without"
            raise ValueError(
                f"the finish reason {_short(self.finish)} of {len(tokens)} tokens {ending} a stop token, although the "
                f"request's limit is {limit}"
            )
        if type(self.reused) is not int or self.reused < 0:
            raise ValueError(f"{_short(self.reused)} as its number of cached tokens")


def _short(value: object) -> str:
    return f"{value!r:.60}"


def sampling_parameters(request: Request, limit: int, seed: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a reply, for use in process and over HTTP."""
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": limit,
        "seed": seed,
        "stop_token_ids": sorted(request.stop),
        # Only the request's stop ids end a reply, not the end tokens that the model's files name.
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


class ServedEngine(ABC):
    """Engine on top of a server that can abort replies: `pause` interrupts them, and they continue after `resume`.

    An interrupted reply continues after its existing tokens, with the new weights and a new cache. Each token and its
    log-probability are therefore computed by one version, never from keys and values of older weights. Replies also
    continue if the sampling process dies: up to `restarts` times, another one is started with the same weights.

    All ranks of `parallel` sample. `pause`, `load` and `resume` are collective, and fail on all ranks if they fail on
    one.
    """

    def __init__(
        self, *, slots: int, max_context: int, vocabulary: int, restarts: int = 0, parallel: Parallel | None = None
    ) -> None:
        self._parallel = parallel or Parallel()
        self._slots = slots
        self._max_context = max_context
        self._vocabulary = vocabulary
        self._version = 0
        # Together they are the cache salt, unique among the server's clients and this client's weights.
        self._name = f"starpod-{uuid4().hex[:12]}"
        self._loads = 0
        self._open = asyncio.Event()
        self._open.set()
        self._pauses = 0
        self._closed = False
        self._calls: set[asyncio.Task[Piece]] = set()
        self._waiting = 0
        self._stats = EngineStats(slots=slots)
        self._busy_since = 0.0
        self._restarts = restarts
        self._starts = 0
        self._restarting: asyncio.Task[None] | None = None

    # --- to be implemented for a kind of server ----------------------------------------------------------------------

    @abstractmethod
    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        """Sample up to `limit` tokens after `prompt`. If cancelled, release the request on the server.

        Caches with another `salt` belong to other weights and must not be used. Raises EngineLost if a restart may
        help, otherwise EngineError.
        """

    @abstractmethod
    async def _halt(self) -> None:
        """Abort all replies and sample nothing until `_go_on`."""

    @abstractmethod
    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        """Send the weights to the halted server."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Let the server sample again."""

    async def _restart(self) -> None:
        """Start another server process with the weights of the lost one. Raises EngineError."""
        raise NotImplementedError("this engine reports no EngineLost")

    @abstractmethod
    async def _shut_down(self) -> None:
        """Release all resources."""

    # --- the interface of engines ------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Reply:
        """Sample one reply, in several calls of the server if it is interrupted.

        Raises ValueError if the prompt cannot be served, and EngineError if the server is lost or the engine closed.
        """
        # An id outside the vocabulary would crash vLLM's core.
        check_prompt(request, max_context=self._max_context, vocabulary=self._vocabulary)
        limit = min(request.max_tokens, self._max_context - len(request.prompt))
        reply = Reply([], [], [], "length")
        while True:
            await self._until_open()
            version, start_count = self._version, self._starts
            try:
                piece = await self._call(request, reply.tokens, limit)
            except EngineLost as error:
                await self._recover(error, start_count)
                continue
            if self._starts != start_count or self._restarting is not None:
                continue  # the new process may have sampled with other weights
            self._stats.sampled += len(piece.tokens)
            self._stats.reused += piece.reused
            self._stats.prefilled += len(request.prompt) + len(reply.tokens) - piece.reused
            reply.tokens.extend(piece.tokens)
            reply.logprobs.extend(piece.logprobs)
            reply.versions.extend([version] * len(piece.tokens))
            has_stopped = bool(reply.tokens) and reply.tokens[-1] in request.stop
            if has_stopped or len(reply.tokens) >= limit:
                self._stats.requests += 1
                return Reply(reply.tokens, reply.logprobs, reply.versions, "stop" if has_stopped else "length")

    def forget(self, conversation: str) -> None:  # noqa: B027 - intentionally empty
        """Do nothing: the server's cache evicts the least recently used entries itself."""

    async def pause(self) -> None:
        """Interrupt all replies. They continue after `resume`."""
        self._close_gate()
        await self._parallel.all_done(self._interrupt())

    def _close_gate(self) -> None:
        if self._open.is_set():
            self._pauses += 1
        self._open.clear()

    def _check_reply(self, piece: Piece, request: Request, limit: int, pauses: int) -> None:
        """Raise ValueError if a reply is impossible, or was aborted without a pause.

        `pauses` is the number of pauses when it was requested.
        """
        piece.check(request, limit, self._vocabulary)
        if piece.finish == ABORT and self._open.is_set() and pauses == self._pauses:
            raise ValueError("an aborted reply, although nothing was paused")

    async def _interrupt(self) -> None:
        await self._control(self._halt)
        if not self._calls:
            return
        # A call that reached the server after the halt would wait there. Cancel it; it is repeated after `resume`.
        _, late_calls = await asyncio.wait(self._calls, timeout=GRACE_SECONDS)
        for call in late_calls:
            call.cancel()
        await asyncio.gather(*late_calls, return_exceptions=True)

    async def load(self, version: int, model: torch.nn.Module) -> None:
        """Hand over the weights. Raises EngineError if that fails; the server's weights are unknown then."""
        await self._parallel.all_done(self._load(version, model))

    async def _load(self, version: int, model: torch.nn.Module) -> None:
        if self._open.is_set():
            raise RuntimeError("load is called between pause and resume")
        self._loads += 1
        await self._control(lambda: self._hand_over(version, model))
        self._version = version

    async def resume(self) -> None:
        await self._parallel.all_done(self._control(self._go_on))
        self._open.set()

    def stats(self) -> EngineStats:
        """Return a copy of the counters. `seconds` is wall-clock time with at least one call in flight."""
        call_count = len(self._calls)
        busy_seconds = perf_counter() - self._busy_since if call_count else 0.0
        return replace(
            self._stats,
            seconds=self._stats.seconds + busy_seconds,
            running=min(call_count, self._slots),
            waiting=self._waiting + max(0, call_count - self._slots),
        )

    async def close(self) -> None:
        """Release all resources. Calls in flight fail. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self._open.set()
        await self._take_back()
        if self._restarting is not None:
            await asyncio.wait((self._restarting,))
        await self._shut_down()

    # --- restarts ----------------------------------------------------------------------------------------------------

    async def _control(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a control call, and repeat it once if the server process dies during it."""
        if self._restarting is not None:
            await asyncio.shield(self._restarting)
        start_count = self._starts
        try:
            await call()
        except EngineLost as error:
            await self._recover(error, start_count)
            await call()

    async def _recover(self, error: EngineLost, process_number: int) -> None:
        """Wait until a process with a higher number runs. Raises `error` if no restart is left."""
        if self._starts != process_number:
            return
        if self._restarting is None:
            if self._closed or self._stats.restarts >= self._restarts:
                raise error
            self._stats.restarts += 1
            self._restarting = asyncio.create_task(self._start_again())
            self._restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shield the restart: if this waiter is cancelled, a half-started process must not be left without an owner.
        await asyncio.shield(self._restarting)

    async def _start_again(self) -> None:
        try:
            await self._take_back()
            await self._restart()
            self._loads += 1
            if not self._open.is_set():
                await self._halt()
            self._starts += 1
        finally:
            self._restarting = None

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _until_open(self) -> None:
        self._waiting += 1
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
        if self._closed:
            raise EngineError("the engine is closed")
        if self._restarting is not None:
            await asyncio.shield(self._restarting)

    async def _take_back(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, request: Request, sampled: list[int], limit: int) -> Piece:
        """Call the server once, in a task that `pause` and `close` can cancel."""
        # A continuation needs another seed. With the same one, the server would reuse the first tokens' random numbers.
        seed = derive(request.seed, len(sampled)) if sampled else request.seed
        prompt = request.prompt + sampled if sampled else request.prompt
        call = asyncio.ensure_future(
            self._sample(request, prompt, limit - len(sampled), seed, f"{self._name}-{self._loads}")
        )
        if not self._calls:
            self._busy_since = perf_counter()
        self._calls.add(call)
        try:
            await asyncio.wait((call,))
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._stats.seconds += perf_counter() - self._busy_since
        return Piece([], []) if call.cancelled() else call.result()
