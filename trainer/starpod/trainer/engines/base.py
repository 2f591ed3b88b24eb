"""Engines sample tokens for agents, behind five verbs: generate, pause, load, resume, stats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starpod.trainer.data.episode import Finish
from starpod.trainer.data.images import Images

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to be sampled.

    prompt: ids of the whole context. max_tokens: of the reply, the end token included; at least 1.
    stop: ids that end the reply; the sampled one is part of it.
    temperature: 0 samples greedily. top_p: 1 samples from the whole distribution.
    seed: of this reply's own random stream. The same prompt, weights and seed give the same reply, whatever else is
        being sampled at the time.
    order: where there is not room for all, requests of a lower one go first.
    conversation: requests of one conversation extend each other's prompts; an engine may keep its cache between them
        until `Engine.forget`. Empty: nothing is kept.
    agent: who asks, of several in an episode; looked at where each has a policy.
    images: those that ids below 0 name; only engines whose model has eyes take such ids.
    """

    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    order: int = 0
    conversation: str = ""
    agent: str = ""
    images: Images = field(default_factory=dict)


def check_prompt(request: Request, *, max_context: int, vocabulary: int) -> None:
    """Raises ValueError for a prompt that no engine over a model of so many ids can go on from."""
    prompt = request.prompt
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to go on from")
    if len(prompt) >= max_context:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room for a reply in the engine's context of {max_context} "
            "tokens: raise max_context, or shorten the episode"
        )
    if not (min(prompt) >= 0 or request.images) or max(prompt) >= vocabulary:
        raise ValueError(f"the prompt has an id that is not among the model's {vocabulary} tokens")


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply."""

    tokens: list[int]
    """Token ids, with the stop id if there is one."""
    logprobs: list[float]
    """Log-probability of each token in nats, at the request's temperature."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish: Finish
    """Reason for which the reply ended."""


@dataclass(slots=True)
class EngineStats:
    """Counted since the engine was made. Differences between two readings are rates.

    sampled, prefilled: tokens. reused: prompt tokens that were still in the cache. seconds: spent computing.
    requests: finished. restarts: of a dead engine. running, waiting: now. slots: replies that can be sampled at once.
    """

    sampled: int = 0
    prefilled: int = 0
    reused: int = 0
    requests: int = 0
    restarts: int = 0
    seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    slots: int = 0


class Engine(Protocol):
    """Samples replies from one policy version at a time.

    The order of a weight hand-over is `pause`, `load`, `resume`. Caches of older weights are dropped by `load`.
    """

    async def generate(self, request: Request) -> Reply:
        """Samples one reply; many calls run together. Raises ValueError for a prompt that leaves no token to sample."""

    def forget(self, conversation: str) -> None:
        """Drops what is kept for a conversation. Harmless to repeat."""

    async def pause(self) -> None:
        """Returns when no token is being sampled. Calls of `generate` wait until `resume`."""

    async def load(self, version: int, model: torch.nn.Module) -> None:
        """Takes the weights of `model` over as policy `version`. Only while paused."""

    async def resume(self) -> None:
        """Goes on, with the weights loaded last."""

    def stats(self) -> EngineStats:
        """Counters and what is going on now."""

    async def close(self) -> None:
        """Frees what it holds. Calls in flight fail."""


class EngineError(RuntimeError):
    """The engine cannot be had, or it broke. The message says which, and what to do about it."""


class EngineLost(EngineError):
    """The process that samples is dead or hangs. What it was asked can be asked again of another one."""
