"""Continuous batching: chooses the tokens to feed to the model at each step and samples replies. Single-threaded."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.data.episode import Finish
from starpod.trainer.engines.base import EngineStats, Reply, Request
from starpod.trainer.engines.own_caches import OwnCaches
from starpod.trainer.engines.sampling import Uniforms, draw
from starpod.trainer.engines.slot_cache import SlotCache, Slots, Span, pad
from starpod.trainer.models.folding import common_prefix
from starpod.trainer.models.masks import TokenMasks, accept, masked
from starpod.trainer.models.vision import showing


@dataclass(slots=True)
class PendingReply:
    """One request that is waiting or being sampled."""

    request: Request
    handle: Any
    """Arbitrary value for the caller's use."""
    limit: int
    """Maximum number of tokens of the reply."""
    matcher: Any = None
    """State of the request's `structure`; None without one."""
    context: list[int] = field(init=False)
    """The prompt and the tokens sampled so far."""
    uniforms: Uniforms = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot: int = -1
    cached_tokens: int = 0
    """Number of tokens of the context that are in the cache."""
    leader: PendingReply | None = None
    """Running job whose context begins with the same `shared` tokens. This job waits and copies their cache entries.
    The leader may itself wait for a leader."""
    shared: int = 0
    keep: bool = True
    """Whether the slot is kept for the conversation's next request."""
    cancelled: bool = False
    """Whether the caller no longer waits."""
    streamed: int = 0
    """Number of sampled tokens that `Request.on_tokens` has got."""

    def __post_init__(self) -> None:
        self.context = list(self.request.prompt)
        self.uniforms = Uniforms(self.request.seed)

    def take_new(self) -> tuple[int, list[int]]:
        """Return the tokens sampled since the last call, with the index of the first one in the reply."""
        start, self.streamed = self.streamed, len(self.logprobs)
        return start, self.context[len(self.request.prompt) + start :]

    def reply(self, finish: Finish) -> Reply:
        return Reply(self.context[len(self.request.prompt) :], self.logprobs, self.versions, finish)


class Batcher:
    """Samples one reply per slot with one model. Each step feeds all jobs that are ready.

    A common beginning of several prompts, such as those of a group, is computed once and copied. Prompts with more than
    `prefill_rows` tokens take several steps.
    """

    def __init__(self, cache: SlotCache | OwnCaches, stats: EngineStats, *, prefill_rows: int) -> None:
        self.masks: TokenMasks | None = None
        self.cache = cache
        self.stats = stats
        self.prefill_rows = prefill_rows
        self.slots = Slots(cache.slots)
        self.running: list[PendingReply] = []
        self.waiting: list[PendingReply] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, job: PendingReply) -> None:
        insort(self.waiting, job, key=lambda waiting_job: waiting_job.request.order)

    def forget(self, conversation: str) -> None:
        """Drop the cache of a conversation, now or as soon as its reply is finished."""
        self.slots.forget(conversation)
        for job in (*self.running, *self.waiting):
            if job.request.conversation == conversation:
                job.keep = False

    def drop_caches(self) -> None:
        """Drop all caches because the weights have changed. Running jobs are read again from the start."""
        self.slots.forget_all()
        for job in self.running:
            job.cached_tokens, job.leader = 0, None

    def drop_all(self) -> list[PendingReply]:
        """Drop all jobs and caches and return the unfinished jobs."""
        jobs = [*self.running, *self.waiting]
        self.slots = Slots(self.cache.slots)
        self.running, self.waiting = [], []
        return jobs

    def step(
        self, read: Callable[[Any], Tensor], head: Callable[[Tensor], Tensor], version: int
    ) -> list[tuple[PendingReply, Reply]]:
        """Feed the model once, sample a token for each completely read context, and return the finished replies.

        Args:
            read: Computes the hidden states [rows, hidden] of a feed of the cache.
            head: Computes the logits [rows, vocabulary] of hidden states.
            version: Version of the weights, which is recorded for each sampled token.
        """
        self._drop_cancelled()
        self._admit()
        self._copy_shared()
        jobs, spans = self._choose()
        if not spans:
            return []
        feed: Any = self.cache.lay_out(spans)
        with showing({key: image for job in jobs for key, image in job.request.images.items()}):
            states = read(feed)
        ready_jobs: list[PendingReply] = []
        rows: list[int] = []
        for job, span, row in zip(jobs, spans, feed.last, strict=True):
            job.cached_tokens += len(span.tokens)
            if job.cached_tokens == len(job.context):
                ready_jobs.append(job)
                rows.append(row)
        self._copy_shared()  # before a finished leader releases its slot
        return self._sample(ready_jobs, states, rows, head, version) if ready_jobs else []

    def _admit(self) -> None:
        """Assign free slots to waiting jobs, lowest `order` first, then in the order of arrival."""
        while self.waiting:
            job = self.waiting[0]
            slot_and_count = self.slots.take(job.request.conversation, job.context, rewinds=self.cache.rewinds)
            if slot_and_count is None:
                return
            self.waiting.pop(0)
            job.slot, job.cached_tokens = slot_and_count
            self.stats.reused += job.cached_tokens
            if not job.cached_tokens:
                self._follow(job)
            self.running.append(job)

    def _follow(self, job: PendingReply) -> None:
        """Set the running job that shares the longest beginning of the prompt as leader. The prompt's last token is
        never shared, because it must be fed to sample the first one of the reply."""
        prompt = job.context[:-1]
        for candidate in self.running:
            shared_length = common_prefix(candidate.context, prompt)
            if shared_length > job.shared and (self.cache.rewinds or shared_length >= candidate.cached_tokens):
                job.leader, job.shared = candidate, shared_length
                if shared_length == len(prompt):
                    return

    def _copy_shared(self) -> None:
        """Copy cache entries from leaders that have read the shared tokens. Leaders precede their followers."""
        for job in self.running:
            if job.leader is not None and job.leader.cached_tokens >= job.shared:
                if self.cache.rewinds or job.leader.cached_tokens == job.shared:
                    self.cache.copy(job.leader.slot, job.slot, job.shared)
                    self.stats.reused += job.shared
                    job.cached_tokens = job.shared
                job.leader = None

    def _choose(self) -> tuple[list[PendingReply], list[Span]]:
        """Choose the tokens to feed: one per sampling job, and at most `prefill_rows` tokens of prompts."""
        jobs, spans = [], []
        room = self.prefill_rows
        for job in self.running:
            if job.leader is not None:
                continue
            count = len(job.context) - job.cached_tokens
            if not self.cache.rewinds:
                # Stop where followers copy the cache.
                count = min([count, *(peer.shared - job.cached_tokens for peer in self.running if peer.leader is job)])
            if count > 1 or not job.logprobs:
                count = min(count, room)
                room -= count
                self.stats.prefilled += count
            if count:
                jobs.append(job)
                spans.append(
                    Span(job.slot, job.cached_tokens, job.context[job.cached_tokens : job.cached_tokens + count])
                )
        return jobs, spans

    def _sample(
        self,
        jobs: Sequence[PendingReply],
        states: Tensor,
        rows: list[int],
        head: Callable[[Tensor], Tensor],
        version: int,
    ) -> list[tuple[PendingReply, Reply]]:
        # Pad the rows to whole vectors here too; see slot_cache.py.
        padded_rows = rows + [rows[0]] * (pad(len(rows)) - len(rows))
        logits = head(states[torch.tensor(padded_rows, device=states.device)]).float()[: len(rows)]
        if self.masks is not None and any(job.matcher for job in jobs):
            logits = masked(logits, self.masks.fill([job.matcher for job in jobs]))
        samples = draw(
            logits,
            [job.request.temperature for job in jobs],
            [job.request.top_p for job in jobs],
            [job.uniforms[len(job.logprobs)] for job in jobs],
        )
        replies = []
        for job, token, logprob in zip(jobs, samples[0].tolist(), samples[1].tolist(), strict=True):
            job.context.append(token)
            job.logprobs.append(logprob)
            job.versions.append(version)
            if job.matcher is not None:
                accept(job.matcher, token)
            has_stopped = token in job.request.stop
            if has_stopped or len(job.logprobs) == job.limit:
                replies.append((job, job.reply("stop" if has_stopped else "length")))
        self.stats.sampled += len(jobs)
        self.stats.requests += len(replies)
        if replies:
            finished_ids = {id(job) for job, _ in replies}
            self._release([job for job in self.running if id(job) in finished_ids])
        return replies

    def _drop_cancelled(self) -> None:
        if any(job.cancelled for job in self.waiting):
            self.waiting = [job for job in self.waiting if not job.cancelled]
        if cancelled := [job for job in self.running if job.cancelled]:
            self._release(cancelled)

    def _release(self, jobs: Sequence[PendingReply]) -> None:
        for job in jobs:
            conversation = job.request.conversation if job.keep else ""
            self.slots.give_back(job.slot, conversation, job.context[: job.cached_tokens])
        released_ids = {id(job) for job in jobs}
        self.running = [job for job in self.running if id(job) not in released_ids]
        for job in self.running:
            if job.leader is not None and id(job.leader) in released_ids:
                job.leader = None
