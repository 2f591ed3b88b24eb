"""The default engine. It samples with the trainer's own weights, in a separate thread."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from starpod.trainer.engines.base import EngineStats, Reply, Request, check_prompt
from starpod.trainer.engines.batcher import Batcher, PendingReply
from starpod.trainer.engines.lean import LeanDecoder
from starpod.trainer.engines.own_caches import make_cache
from starpod.trainer.engines.slot_cache import SlotCache
from starpod.trainer.models.masks import TokenMasks
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.precision import compute_dtype, kept_in_float32, output_layer
from starpod.trainer.models.trunk import trunk_of, unwrapped
from starpod.trainer.models.vision import view_of
from starpod.trainer.parallel.sharding import whole


class TorchEngine:
    """Engine with continuous batching and a cache that has one slot per conversation.

    Requests enter and leave the batch at every step, and only the new tokens of a conversation's next prompt are read.
    Requests wait if all slots are busy. If idle conversations hold the slots, the least recently used one loses its
    cache. A separate thread computes, so the event loop can serve the network.

    The engine shares the model's parameters, or holds a rounded copy if the model computes in another type than that of
    its weights. Parameters must not change while the engine samples, and `load` must be called after a change.

    On a CPU with one thread, a reply's tokens and log-probabilities depend only on its prompt, seed and weights, bit
    for bit (see slot_cache.py).

    Args:
        model: A Policy, or a causal LM of transformers with or without adapters.
        slots: Maximum number of replies sampled at the same time.
        max_context: Maximum number of tokens of prompt and reply together.
        prefill_rows: Maximum number of prompt tokens per step.
    """

    def __init__(
        self, model: nn.Module, *, slots: int = 128, max_context: int = 4096, prefill_rows: int = 4096
    ) -> None:
        if slots < 1 or max_context < 2 or prefill_rows < 1:
            raise ValueError("an engine needs at least 1 slot, a context of 2 tokens and 1 prefill row")
        self.max_context = max_context
        self._model = _sharing_copy(_causal_lm(model))
        self._tokenizer = model.tokenizer if isinstance(model, Policy) else None
        self._vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._sees = view_of(self._model) is not None
        self._cache = make_cache(self._model, slots, max_context)
        self._stats = EngineStats(slots=slots, apart=not isinstance(self._cache, SlotCache))
        self._lean = None
        if isinstance(self._cache, SlotCache) and LeanDecoder.fits(self._model):
            self._lean = LeanDecoder(self._model, self._cache)
        self._batcher = Batcher(self._cache, self._stats, prefill_rows=prefill_rows)
        self._version = 0
        self._inbox: deque[PendingReply | str] = deque()  # new jobs and names of conversations to forget, in order
        self._executor = ThreadPoolExecutor(1, "torch-engine", torch.set_num_threads, (torch.get_num_threads(),))
        self._worker: asyncio.Future[None] | None = None
        self._paused = False
        self._closed = False

    # --- the interface of engines -------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Reply:
        """Sample one reply. Raises ValueError if the request cannot be served, RuntimeError if the engine is closed."""
        self._check(request)
        limit = min(request.max_tokens, self.max_context - len(request.prompt))
        matcher = await asyncio.to_thread(self._match, request.structure) if request.structure else None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        job = PendingReply(request, (loop, future), limit, matcher)
        self._inbox.append(job)
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            job.cancelled = True
            raise

    def forget(self, conversation: str) -> None:
        """Drop the cache of a conversation, if there is one."""
        if conversation:
            self._inbox.append(conversation)

    async def pause(self) -> None:
        """Stop sampling and return once no token is being sampled. Unfinished replies continue after `resume`."""
        self._paused = True
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def load(self, version: int, model: nn.Module) -> None:
        """Share the model's weights, or copy them if they are sharded or of another type.

        Unfinished replies continue with the new weights, and `Reply.versions` tells their tokens apart.
        Raises RuntimeError unless paused, and ValueError for a model of another shape.
        """
        if not self._paused or self._worker is not None:
            raise RuntimeError("weights are loaded while the engine is paused: call pause() first")
        _share_weights(_causal_lm(model), self._model)
        if self._lean is not None:
            self._lean.refresh()
        self._version = version
        self._take_inbox()
        self._batcher.drop_caches()

    async def resume(self) -> None:
        """Continue sampling with the latest loaded weights."""
        self._paused = False
        self._wake()

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        waiting = len(self._batcher.waiting) + sum(isinstance(item, PendingReply) for item in tuple(self._inbox))
        return replace(self._stats, running=len(self._batcher.running), waiting=waiting)

    async def close(self) -> None:
        """Release all resources. Calls in flight raise RuntimeError. Safe to call again."""
        self._closed = True
        await self.pause()
        self._take_inbox()
        _fail(self._batcher.drop_all(), RuntimeError("the engine was closed while the reply was sampled"))
        self._executor.shutdown()

    # --- the thread that computes -------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        check_prompt(request, max_context=self.max_context, vocabulary=self._vocabulary)
        if request.images and not self._sees:
            raise ValueError("the prompt has an image, but the model has no image input")
        if request.max_tokens < 1 or request.temperature < 0 or not 0 < request.top_p <= 1:
            raise ValueError("a request needs max_tokens >= 1, temperature >= 0 and 0 < top_p <= 1")

    def _match(self, structure: str) -> Any:
        if self._batcher.masks is None:
            if self._tokenizer is None:
                raise ValueError("a structure of replies needs a tokenizer, and this engine has a model without one")
            self._batcher.masks = TokenMasks(self._tokenizer, self._vocabulary)
        return self._batcher.masks.matcher(structure)

    def _wake(self) -> None:
        """Start the worker if there are jobs. Runs on the event loop, like all methods except `_work`."""
        if self._worker is None and not self._paused and (self._inbox or self._batcher.busy):
            self._worker = asyncio.get_running_loop().run_in_executor(self._executor, self._work)
            self._worker.add_done_callback(self._rest)

    def _rest(self, worker: asyncio.Future[None]) -> None:
        self._worker = None
        if not worker.cancelled() and (error := worker.exception()) is not None:
            _fail(self._batcher.drop_all(), error)
        self._wake()

    def _work(self) -> None:
        """Run steps in the worker thread until no job is left or a pause is requested."""
        head = output_layer(self._model)
        read = partial(self._cache.run, trunk_of(self._model)) if self._lean is None else self._lean.run
        with torch.inference_mode():
            while not self._paused:
                self._take_inbox()
                if not self._batcher.busy:
                    return
                start_time = perf_counter()
                replies = self._batcher.step(read, head, self._version)
                self._stats.seconds += perf_counter() - start_time
                streams = [(job, *job.take_new()) for job in self._batcher.running if job.request.on_tokens]
                if replies or streams:
                    loop = (replies or streams)[0][0].handle[0]
                    loop.call_soon_threadsafe(_deliver, replies, streams)

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, PendingReply):
                self._batcher.add(item)
            else:
                self._batcher.forget(item)


def _deliver(finished: list[tuple[PendingReply, Reply]], streams: list[tuple[PendingReply, int, list[int]]]) -> None:
    for job, start, tokens in streams:
        if job.request.on_tokens is not None and tokens:
            job.request.on_tokens(start, tokens)
    for job, reply in finished:
        _, future = job.handle
        if not future.done():
            future.set_result(reply)


def _fail(jobs: list[PendingReply], error: BaseException) -> None:
    for job in jobs:
        _, future = job.handle
        if not future.done():
            future.set_exception(error)


# --- weights ----------------------------------------------------------------------------------------------------------


def _causal_lm(model: nn.Module) -> Any:
    return unwrapped(model.model if isinstance(model, Policy) else model)


def _sharing_copy(model: Any) -> Any:
    """Return a copy of the modules in evaluation mode that shares parameters and buffers with the model.

    Parameters that the model rounds before computing are copied in rounded form instead.
    """
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    dtype, float32_ids = compute_dtype(model), kept_in_float32(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype != dtype and id(parameter) not in float32_ids:
                memo[id(parameter)] = nn.Parameter(whole(parameter).to(dtype), requires_grad=False)
    # Evaluation mode disables dropout, and also gradient checkpointing, which would disable the cache.
    return copy.deepcopy(model, memo).eval()


def _share_weights(source: nn.Module, shared_model: nn.Module) -> None:
    """Make a model share the source's parameters. Sharded parameters and those of another type are copied."""
    # Tied weights have several owners, so every name is needed.
    sources, targets = (dict(model.named_parameters(remove_duplicate=False)) for model in (source, shared_model))
    if sources.keys() != targets.keys() or any(sources[name].shape != targets[name].shape for name in sources):
        raise ValueError("the model to load has different parameters than the engine's model")
    with torch.no_grad():
        for name, parameter in sources.items():
            if hasattr(parameter, "full_tensor") or parameter.dtype != targets[name].dtype:
                targets[name].copy_(whole(parameter))
            elif parameter is not targets[name]:
                owner, _, attribute = name.rpartition(".")
                setattr(shared_model.get_submodule(owner), attribute, parameter)
