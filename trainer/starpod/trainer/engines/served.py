"""Common part of the engines that sample in other processes or on other machines."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch

from starpod.trainer.engines.base import EngineError, EngineLost, EngineStats, Reply, Request, check_prompt
from starpod.trainer.seeds import derive

GRACE_SECONDS = 1.0
"""Time for which `pause` waits for aborted calls to come back with what they had, before it takes them back without."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Result of one call. aborted: whether a pause cut it short. reused: prompt tokens that were in the cache."""

    tokens: list[int]
    logprobs: list[float]
    aborted: bool = False
    reused: int = 0


def sampling_parameters(request: Request, limit: int, seed: int) -> dict[str, Any]:
    """How vLLM samples a reply, in process or over HTTP."""
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": limit,
        "seed": seed,
        "stop_token_ids": sorted(request.stop),
        # The request's own stop ids count, and no others that the model's files name.
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


class ServedEngine(ABC):
    """An engine over a server that can abort: `pause` cuts replies short, and they go on after `resume`.

    A reply that was cut goes on from the tokens it has, under the weights that are there then and with a cache of their
    making. Each token's version is thus the one that sampled it, and each log-probability that version's own: nothing
    is computed from keys and values of older weights. So it goes on too where the process that samples dies, up to
    `restarts` times: another one is started with the same weights.
    """

    def __init__(self, *, slots: int, max_context: int, vocabulary: int, restarts: int = 0) -> None:
        self._slots = slots
        self._max_context = max_context
        self._vocabulary = vocabulary
        self._version = 0
        # Of this engine among all that the server serves, and of its weights among all that it loads.
        self._name = f"starpod-{uuid4().hex[:12]}"
        self._loads = 0
        self._open = asyncio.Event()
        self._open.set()
        self._closed = False
        self._calls: set[asyncio.Task[Piece]] = set()
        self._waiting = 0
        self._stats = EngineStats(slots=slots)
        self._busy_since = 0.0
        self._restarts = restarts
        self._starts = 0
        self._restarting: asyncio.Task[None] | None = None

    # --- what a kind of server has to do -----------------------------------------------------------------------------

    @abstractmethod
    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        """Samples up to `limit` tokens after `prompt`. `salt` keeps its cache apart from that of other weights.

        Raises EngineError; EngineLost where a restart may help. Cancelled, it frees what the server holds for it.
        """

    @abstractmethod
    async def _halt(self) -> None:
        """Aborts all that is being sampled, and samples nothing until `_go_on`."""

    @abstractmethod
    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        """Brings the weights to the halted server."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Samples again."""

    async def _restart(self) -> None:
        """Starts another server process, with the weights of the lost one. Raises EngineError."""
        raise NotImplementedError("this engine reports no EngineLost")

    @abstractmethod
    async def _shut_down(self) -> None:
        """Frees what is held."""

    # --- the five verbs ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Reply:
        """As `Engine.generate`.

        Raises ValueError for a prompt that cannot be served, EngineError where the server is gone or the engine closed.
        """
        # An id that vLLM's model does not know would end its core.
        check_prompt(request, max_context=self._max_context, vocabulary=self._vocabulary)
        limit = min(request.max_tokens, self._max_context - len(request.prompt))
        reply = Reply([], [], [], "length")
        while True:
            await self._until_open()
            version, started = self._version, self._starts
            try:
                piece = await self._call(request, reply.tokens, limit)
            except EngineLost as error:
                await self._recover(error, started)
                continue
            if self._starts != started or self._restarting is not None:
                continue  # perhaps of a process that has other weights
            if len(piece.logprobs) != len(piece.tokens):
                raise EngineError(f"vLLM gave {len(piece.logprobs)} log-probabilities for {len(piece.tokens)} tokens")
            self._stats.sampled += len(piece.tokens)
            self._stats.reused += piece.reused
            self._stats.prefilled += len(request.prompt) + len(reply.tokens) - piece.reused
            reply.tokens.extend(piece.tokens)
            reply.logprobs.extend(piece.logprobs)
            reply.versions.extend([version] * len(piece.tokens))
            ended = bool(reply.tokens) and reply.tokens[-1] in request.stop
            if ended or len(reply.tokens) >= limit:
                self._stats.requests += 1
                return Reply(reply.tokens, reply.logprobs, reply.versions, "stop" if ended else "length")
            if not piece.aborted:
                raise EngineError("vLLM ended a reply before a stop token and before its limit")

    def forget(self, conversation: str) -> None:  # noqa: B027 - it is what the verb comes to here
        """Nothing to do: the server's own cache drops what was not used for longest."""

    async def pause(self) -> None:
        """As `Engine.pause`: replies under way are cut, and go on after `resume`."""
        self._open.clear()
        await self._control(self._halt)
        if not self._calls:
            return
        # A call that reached the server after the halt would wait there for `resume`. It is made again then.
        _, late = await asyncio.wait(self._calls, timeout=GRACE_SECONDS)
        for call in late:
            call.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def load(self, version: int, model: torch.nn.Module) -> None:
        """As `Engine.load`. Raises EngineError where the weights did not arrive: the server's are then not known."""
        if self._open.is_set():
            raise RuntimeError("load is called between pause and resume")
        self._loads += 1
        await self._control(lambda: self._hand_over(version, model))
        self._version = version

    async def resume(self) -> None:
        """As `Engine.resume`."""
        await self._control(self._go_on)
        self._open.set()

    def stats(self) -> EngineStats:
        """As `Engine.stats`; `seconds` are those with anything to sample, by the wall clock."""
        running = len(self._calls)
        busy = perf_counter() - self._busy_since if running else 0.0
        return replace(
            self._stats,
            seconds=self._stats.seconds + busy,
            running=min(running, self._slots),
            waiting=self._waiting + max(0, running - self._slots),
        )

    async def close(self) -> None:
        """As `Engine.close`. Harmless to repeat."""
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
        """A control call, made again where the server process dies meanwhile."""
        if self._restarting is not None:
            await asyncio.shield(self._restarting)
        started = self._starts
        try:
            await call()
        except EngineLost as error:
            await self._recover(error, started)
            await call()

    async def _recover(self, error: EngineLost, started: int) -> None:
        """Returns when there is a later process than the one of that number. Raises `error` where none is to be."""
        if self._starts != started:
            return
        if self._restarting is None:
            if self._closed or self._stats.restarts >= self._restarts:
                raise error
            self._stats.restarts += 1
            self._restarting = asyncio.create_task(self._start_again())
            self._restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Whoever waits may be cancelled; a process half started would be nobody's.
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
        """One call of the server, which `pause` and `close` can take back."""
        # What goes on draws from a stream of its own: the server's would begin again with the first tokens' draws.
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
        return Piece([], [], aborted=True) if call.cancelled() else call.result()
