"""Continuous batching: what is fed to the model at each step, and which replies come of it. Runs in one thread."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.data.episode import Finish
from starpod.trainer.engines.base import EngineStats, Reply, Request
from starpod.trainer.engines.sampling import Uniforms, draw
from starpod.trainer.engines.slot_cache import Feed, SlotCache, Slots, Span, pad
from starpod.trainer.models.folding import common_prefix
from starpod.trainer.models.vision import showing


@dataclass(slots=True)
class Job:
    """One request on its way. handle: the caller's own.

    context: the prompt and what has been sampled. fed: how many of its tokens the cache holds. limit: tokens of the
    reply, at most. cancelled: nobody waits for it any more.
    leader: another job that reads the same first `shared` tokens: this one waits, and copies them in the cache. The
    leader may wait for one of its own.
    """

    request: Request
    handle: Any
    limit: int
    context: list[int] = field(init=False)
    uniforms: Uniforms = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot: int = -1
    fed: int = 0
    leader: Job | None = None
    shared: int = 0
    keep: bool = True
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.context = list(self.request.prompt)
        self.uniforms = Uniforms(self.request.seed)

    def reply(self, finish: Finish) -> Reply:
        return Reply(self.context[len(self.request.prompt) :], self.logprobs, self.versions, finish)


class Batcher:
    """Samples replies with one model, as many at a time as there are slots. Each step feeds all that is ready.

    What several prompts begin with, as those of a group do, is read once and copied.

    prefill_rows: prompt tokens of one step, at most; longer prompts are read over several steps.
    """

    def __init__(self, cache: SlotCache, stats: EngineStats, *, prefill_rows: int) -> None:
        self.cache = cache
        self.stats = stats
        self.prefill_rows = prefill_rows
        self.slots = Slots(cache.slots)
        self.running: list[Job] = []
        self.waiting: list[Job] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=lambda each: each.request.order)

    def forget(self, conversation: str) -> None:
        """Drops what is kept for a conversation, now or as soon as its reply is over."""
        self.slots.forget(conversation)
        for job in (*self.running, *self.waiting):
            if job.request.conversation == conversation:
                job.keep = False

    def drop_caches(self) -> None:
        """The weights are others now: whatever is running is read again, from its start."""
        self.slots.forget_all()
        for job in self.running:
            job.fed, job.leader = 0, None

    def drop_all(self) -> list[Job]:
        """Gives up everything. Returns the jobs that were not finished."""
        jobs = [*self.running, *self.waiting]
        self.slots = Slots(self.cache.slots)
        self.running, self.waiting = [], []
        return jobs

    def step(
        self, read: Callable[[Feed], Tensor], head: Callable[[Tensor], Tensor], version: int
    ) -> list[tuple[Job, Reply]]:
        """Feeds the model once and samples where a context has been read to its end. Returns what is finished.

        read: hidden states of the rows of a feed. head: logits of hidden states.
        """
        self._drop_cancelled()
        self._admit()
        self._copy_shared()
        jobs, spans = self._choose()
        if not spans:
            return []
        feed = self.cache.lay_out(spans)
        with showing({key: image for job in jobs for key, image in job.request.images.items()}):
            states = read(feed)
        ready: list[Job] = []
        rows: list[int] = []
        for job, span, row in zip(jobs, spans, feed.last, strict=True):
            job.fed += len(span.tokens)
            if job.fed == len(job.context):
                ready.append(job)
                rows.append(row)
        self._copy_shared()  # before a leader that ends gives its slot back
        return self._sample(ready, states, rows, head, version) if ready else []

    def _admit(self) -> None:
        """Waiting ones enter, by their order and then as they came, while there are slots."""
        while self.waiting:
            job = self.waiting[0]
            taken = self.slots.take(job.request.conversation, job.context)
            if taken is None:
                return
            self.waiting.pop(0)
            job.slot, job.fed = taken
            self.stats.reused += job.fed
            if not job.fed:
                self._follow(job)
            self.running.append(job)

    def _follow(self, job: Job) -> None:
        """Looks for a running job whose context begins like this one's prompt. The last token is never shared."""
        prompt = job.context[:-1]
        for other in self.running:
            if (shared := common_prefix(other.context, prompt)) > job.shared:
                job.leader, job.shared = other, shared
                if shared == len(prompt):
                    return

    def _copy_shared(self) -> None:
        """Gives those who wait what their leaders have read. Leaders stand before those who wait for them."""
        for job in self.running:
            if job.leader is not None and job.leader.fed >= job.shared:
                self.cache.copy(job.leader.slot, job.slot, job.shared)
                self.stats.reused += job.shared
                job.fed, job.leader = job.shared, None

    def _choose(self) -> tuple[list[Job], list[Span]]:
        """Chooses the tokens to feed: one token for each job that samples, and of prompts as much as fits."""
        jobs, spans = [], []
        room = self.prefill_rows
        for job in self.running:
            if job.leader is not None:
                continue
            count = len(job.context) - job.fed
            if count > 1 or not job.logprobs:
                count = min(count, room)
                room -= count
                self.stats.prefilled += count
            if count:
                jobs.append(job)
                spans.append(Span(job.slot, job.fed, job.context[job.fed : job.fed + count]))
        return jobs, spans

    def _sample(
        self, jobs: Sequence[Job], states: Tensor, rows: list[int], head: Callable[[Tensor], Tensor], version: int
    ) -> list[tuple[Job, Reply]]:
        # Whole vectors of rows here as well.
        padded = rows + [rows[0]] * (pad(len(rows)) - len(rows))
        logits = head(states[torch.tensor(padded, device=states.device)]).float()[: len(rows)]
        drawn = draw(
            logits,
            [job.request.temperature for job in jobs],
            [job.request.top_p for job in jobs],
            [job.uniforms[len(job.logprobs)] for job in jobs],
        )
        finished = []
        for job, token, logprob in zip(jobs, drawn[0].tolist(), drawn[1].tolist(), strict=True):
            job.context.append(token)
            job.logprobs.append(logprob)
            job.versions.append(version)
            stopped = token in job.request.stop
            if stopped or len(job.logprobs) == job.limit:
                finished.append((job, job.reply("stop" if stopped else "length")))
        self.stats.sampled += len(jobs)
        self.stats.requests += len(finished)
        if finished:
            over = {id(job) for job, _ in finished}
            self._release([job for job in self.running if id(job) in over])
        return finished

    def _drop_cancelled(self) -> None:
        if any(job.cancelled for job in self.waiting):
            self.waiting = [job for job in self.waiting if not job.cancelled]
        if cancelled := [job for job in self.running if job.cancelled]:
            self._release(cancelled)

    def _release(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            conversation = job.request.conversation if job.keep else ""
            self.slots.give_back(job.slot, conversation, job.context[: job.fed])
        gone = {id(job) for job in jobs}
        self.running = [job for job in self.running if id(job) not in gone]
        for job in self.running:
            if job.leader is not None and id(job.leader) in gone:
                job.leader = None
