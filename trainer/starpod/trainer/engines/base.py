"""Interface of engines, which sample tokens for agents: generate, pause, load, resume and stats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starpod.trainer.data.episode import Finish
from starpod.trainer.data.images import Images

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to be sampled."""

    prompt: list[int]
    """Token ids of the whole context."""
    max_tokens: int
    """Maximum number of tokens of the reply, including the stop token; at least 1."""
    stop: frozenset[int]
    """Token ids that end the reply."""
    temperature: float = 1.0
    """Temperature of the softmax; 0 is greedy."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling; 1 samples from the whole distribution."""
    seed: int = 0
    """Seed of the reply's random stream. A reply depends on prompt, weights and seed, not on concurrent requests."""
    order: int = 0
    """Priority if not all requests fit into the batch; lower values go first."""
    conversation: str = ""
    """Name of the conversation. The engine may keep its cache for the next request until `Engine.forget`; "" keeps
    nothing."""
    agent: str = ""
    """Agent of the episode that sends the request. It selects the policy if each agent has its own."""
    images: Images = field(default_factory=dict)
    """Images that the negative ids of the prompt refer to; only for vision models."""
    structure: str = ""
    """Structure that the reply must have (models/masks.py); "" for any. Log-probabilities are those under its masks."""
    on_tokens: Callable[[int, list[int]], None] | None = field(default=None, compare=False, repr=False)
    """Called on the event loop while the reply is sampled, with the index of the first new token in the reply, and the
    new tokens. The last ones may be left out. If its process dies, an engine may begin again at a lower index."""


def check_prompt(request: Request, *, max_context: int, vocabulary: int) -> None:
    """Check a prompt before it is sampled from.

    Args:
        request: Its prompt may have negative ids, which refer to `images`.
        max_context: Tokens of prompt and reply together that the engine can hold.
        vocabulary: Number of token ids of the model.

    Raises:
        ValueError: The prompt is empty, leaves no room for a reply, or has an id outside the vocabulary.
    """
    prompt = request.prompt
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to continue")
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
    """Reason why the reply ended."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was created, and its current load."""

    sampled: int = 0
    """Number of sampled tokens."""
    prefilled: int = 0
    """Number of prompt tokens that were computed."""
    reused: int = 0
    """Number of prompt tokens that were still in the cache."""
    requests: int = 0
    """Number of finished requests."""
    restarts: int = 0
    """Number of restarts after the sampling process died or hung."""
    seconds: float = 0.0
    """Seconds spent computing."""
    running: int = 0
    """Number of requests that are being sampled now."""
    waiting: int = 0
    """Number of requests that are waiting now."""
    slots: int = 0
    """Number of replies that can be sampled at the same time."""
    apart: bool = False
    """Whether each reply is computed by itself, because the model's layers allow no batch of different contexts."""


class Engine(Protocol):
    """Samples replies from one policy version at a time.

    New weights are handed over by `pause`, `load` and `resume`, in this order. `load` drops caches of older weights.
    """

    async def generate(self, request: Request) -> Reply:
        """Sample one reply; concurrent calls are batched. Raises ValueError if the prompt leaves no token to sample."""

    def forget(self, conversation: str) -> None:
        """Drop the cache of a conversation, if there is one."""

    async def pause(self) -> None:
        """Stop sampling and return once no token is being sampled. Calls of `generate` wait until `resume`."""

    async def load(self, version: int, model: torch.nn.Module) -> None:
        """Take over the weights of `model` as policy `version`. Allowed only while paused."""

    async def resume(self) -> None:
        """Continue sampling with the latest loaded weights."""

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""

    async def close(self) -> None:
        """Release all resources. Calls in flight fail."""


class UpdateLock(asyncio.Lock):
    """Lock that is held while weights are updated, or read in order to restart an engine with them.

    Attributes:
        version: Policy version of the weights.
    """

    version = 0


class EngineError(RuntimeError):
    """The engine is unavailable or broken. The message says why and what to do."""


class EngineLost(EngineError):
    """The sampling process died or hangs. Its requests can be repeated in a new process."""
