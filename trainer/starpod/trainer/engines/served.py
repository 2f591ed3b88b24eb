"""Base class of the engines that sample in other processes or on other machines."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch

from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.structure import part
from starpod.trainer.engines.base import EngineError, EngineLost, EngineStats, Reply, Request, check_prompt
from starpod.trainer.engines.piece import ABORT, Piece
from starpod.trainer.engines.restarts import Restarts
from starpod.trainer.parallel.ranks import Parallel

GRACE_SECONDS = 1.0
"""Time for which `pause` waits for aborted calls to return their tokens. It then cancels the remaining calls."""


def sampling_parameters(request: Request, limit: int, seed: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a reply of at most `limit` tokens, for use in process and over HTTP."""
    structure = {"structured_outputs": {"structural_tag": part(request.structure)[0]}} if request.structure else {}
    return {
        **structure,
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
        self._restarts = Restarts(restarts, self._start_again)

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
            version, process = self._version, self._restarts.process
            try:
                piece = await self._call(request, reply.tokens, limit)
            except EngineLost as error:
                await self._restarts.recover(error, process)
                continue
            if self._restarts.process != process or self._restarts.under_way:
                continue  # the new process may have sampled with other weights
            if request.structure and piece.finish == ABORT:
                continue  # a server cannot continue inside of a structure: begin the reply again
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
        await self._restarts.repeat(self._halt)
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
        await self._restarts.repeat(lambda: self._hand_over(version, model))
        self._version = version

    async def resume(self) -> None:
        await self._parallel.all_done(self._restarts.repeat(self._go_on))
        self._open.set()

    def stats(self) -> EngineStats:
        """Return a copy of the counters. `seconds` is wall-clock time with at least one call in flight."""
        call_count = len(self._calls)
        busy_seconds = perf_counter() - self._busy_since if call_count else 0.0
        return replace(
            self._stats,
            restarts=self._restarts.used,
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
        await self._restarts.end()
        await self._shut_down()

    async def _start_again(self) -> None:
        await self._take_back()
        await self._restart()
        self._loads += 1
        if not self._open.is_set():
            await self._halt()

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _until_open(self) -> None:
        self._waiting += 1
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
        if self._closed:
            raise EngineError("the engine is closed")
        await self._restarts.wait()

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
