"""The default engine: samples with the trainer's own weights, in a thread of its own."""

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
from starpod.trainer.engines.batcher import Batcher, Job
from starpod.trainer.engines.lean import LeanDecoder
from starpod.trainer.engines.slot_cache import ATTENTION, SlotCache
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.precision import compute_dtype, kept_in_float32, output_layer
from starpod.trainer.models.trunk import plain, trunk_of
from starpod.trainer.models.vision import view_of
from starpod.trainer.parallel import whole


class TorchEngine:
    """Continuous batching over a cache with one slot per conversation.

    Finished replies leave and waiting ones enter at every step; of a conversation's next prompt only what is new is
    read. It computes in one thread of its own, so that the event loop serves the network meanwhile. Where all slots are
    busy, requests wait; where idle conversations hold them, the one unused for longest loses its cache.

    model: a Policy, or a transformers causal LM, with or without adapters. Its parameters are shared where they can be,
    so no second model is held; where it computes in another type than its weights have, a rounded copy of them is. They
    must not change while the engine samples, and `load` must be called when they have.
    slots: replies at a time. max_context: tokens of prompt and reply together. prefill_rows: prompt tokens of one step.

    On a CPU with one thread, a reply's tokens and log-probabilities depend on its prompt, seed and weights alone, bit
    for bit (see slot_cache.py).
    """

    def __init__(
        self, model: nn.Module, *, slots: int = 128, max_context: int = 4096, prefill_rows: int = 4096
    ) -> None:
        if slots < 1 or max_context < 2 or prefill_rows < 1:
            raise ValueError("an engine needs at least 1 slot, a context of 2 tokens and 1 prefill row")
        self.max_context = max_context
        self._model = _sharing_copy(_causal_lm(model))
        parameter = next(self._model.parameters())
        self._vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._sees = view_of(self._model) is not None
        self._stats = EngineStats(slots=slots)
        self._cache = SlotCache(self._model.config, slots, max_context, parameter.device, compute_dtype(self._model))
        self._lean = LeanDecoder(self._model, self._cache) if LeanDecoder.fits(self._model) else None
        self._batcher = Batcher(self._cache, self._stats, prefill_rows=prefill_rows)
        self._version = 0
        self._inbox: deque[Job | str] = deque()  # jobs, and conversations to be forgotten, in the order of the calls
        self._executor = ThreadPoolExecutor(1, "torch-engine", torch.set_num_threads, (torch.get_num_threads(),))
        self._worker: asyncio.Future[None] | None = None
        self._paused = False
        self._closed = False

    # --- the five verbs -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Reply:
        """Samples one reply. Raises ValueError for a request that cannot be served, RuntimeError when closed."""
        self._check(request)
        limit = min(request.max_tokens, self.max_context - len(request.prompt))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        job = Job(request, (loop, future), limit)
        self._inbox.append(job)
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            job.cancelled = True
            raise

    def forget(self, conversation: str) -> None:
        """Drops what is kept for a conversation. Harmless to repeat."""
        if conversation:
            self._inbox.append(conversation)

    async def pause(self) -> None:
        """Returns when no token is being sampled. Replies under way go on after `resume`."""
        self._paused = True
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def load(self, version: int, model: nn.Module) -> None:
        """Takes the weights over: shares them, or copies them where they are spread over several GPUs.

        Replies under way go on with the new weights; `Reply.versions` says which token came from which.
        Raises RuntimeError unless paused, ValueError for a model of another shape.
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
        """Goes on, with the weights loaded last."""
        self._paused = False
        self._wake()

    def stats(self) -> EngineStats:
        """Counters, and what is going on now."""
        waiting = len(self._batcher.waiting) + sum(isinstance(item, Job) for item in tuple(self._inbox))
        return replace(self._stats, running=len(self._batcher.running), waiting=waiting)

    async def close(self) -> None:
        """Frees what it holds. Calls in flight raise RuntimeError. Harmless to repeat."""
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
            raise ValueError("the prompt shows an image, and the model has no eyes for it")
        if request.max_tokens < 1 or request.temperature < 0 or not 0 < request.top_p <= 1:
            raise ValueError("a request needs max_tokens >= 1, temperature >= 0 and 0 < top_p <= 1")

    def _wake(self) -> None:
        """Starts the worker if there is something to do. Called on the event loop, like everything but `_work`."""
        if self._worker is None and not self._paused and (self._inbox or self._batcher.busy):
            self._worker = asyncio.get_running_loop().run_in_executor(self._executor, self._work)
            self._worker.add_done_callback(self._rest)

    def _rest(self, worker: asyncio.Future[None]) -> None:
        self._worker = None
        if not worker.cancelled() and (error := worker.exception()) is not None:
            _fail(self._batcher.drop_all(), error)
        self._wake()

    def _work(self) -> None:
        """Steps until there is nothing to do, or a pause is asked for."""
        head = output_layer(self._model)
        read = partial(self._cache.run, trunk_of(self._model)) if self._lean is None else self._lean.run
        with torch.inference_mode():
            while not self._paused:
                self._take_inbox()
                if not self._batcher.busy:
                    return
                began = perf_counter()
                finished = self._batcher.step(read, head, self._version)
                self._stats.seconds += perf_counter() - began
                if finished:
                    loop = finished[0][0].handle[0]
                    loop.call_soon_threadsafe(_deliver, finished)

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Job):
                self._batcher.add(item)
            else:
                self._batcher.forget(item)


def _deliver(finished: list[tuple[Job, Reply]]) -> None:
    for job, reply in finished:
        _, future = job.handle
        if not future.done():
            future.set_result(reply)


def _fail(jobs: list[Job], error: BaseException) -> None:
    for job in jobs:
        _, future = job.handle
        if not future.done():
            future.set_exception(error)


# --- weights ----------------------------------------------------------------------------------------------------------


def _causal_lm(model: nn.Module) -> Any:
    return plain(model.model if isinstance(model, Policy) else model)


def _sharing_copy(model: Any) -> Any:
    """Modules of their own, which are set to sample while the model may train, with the same parameters and buffers, or
    with parameters rounded to what the model computes in."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    dtype, kept = compute_dtype(model), kept_in_float32(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype != dtype and id(parameter) not in kept:
                shared[id(parameter)] = nn.Parameter(whole(parameter).to(dtype), requires_grad=False)
    shared_model = copy.deepcopy(model, shared)
    shared_model.config.get_text_config()._attn_implementation = ATTENTION
    # In evaluation mode nothing is dropped out, and no cache is given up for recomputing activations.
    return shared_model.eval()


def _share_weights(source: nn.Module, shared_model: nn.Module) -> None:
    """Makes it use the source's parameters. Those that are sharded are put together and copied, and so are those
    of another type."""
    # Under all of their names: tied weights have several owners.
    theirs, ours = (dict(each.named_parameters(remove_duplicate=False)) for each in (source, shared_model))
    if theirs.keys() != ours.keys() or any(theirs[name].shape != ours[name].shape for name in theirs):
        raise ValueError("the model to be loaded has other parameters than the one that the engine was made for")
    with torch.no_grad():
        for name, parameter in theirs.items():
            if hasattr(parameter, "full_tensor") or parameter.dtype != ours[name].dtype:
                ours[name].copy_(whole(parameter))
            elif parameter is not ours[name]:
                owner, _, attribute = name.rpartition(".")
                setattr(shared_model.get_submodule(owner), attribute, parameter)
