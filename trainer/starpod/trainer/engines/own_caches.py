"""Caches of transformers, one per conversation, for models whose layers `SlotCache` cannot serve.

Layers with chunks or recurrent states (linear attention, state spaces) have states that cannot be cut at an earlier
token. Each reply is computed by itself, which is slower than one batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from starpod.trainer.engines.base import EngineError
from starpod.trainer.engines.slot_cache import ATTENTION, SlotCache, Span
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import hidden_states, layer_kinds, trunk_of

_NAMES = ("past_key_values", "cache_params")
"""Names under which models of transformers take and return their cache."""

_PROBE = 12
"""Number of tokens that a model reads to test a cache."""


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans to be read one after the other."""

    spans: Sequence[Span]
    last: list[int]
    """Row of the last token of each span."""


class OwnCaches:
    """One cache per slot, of the class that the model's forward pass makes. It has the methods of `SlotCache`."""

    rewinds = False

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self._caches: list[dict[str, Any]] = [{} for _ in range(slots)]

    def lay_out(self, spans: Sequence[Span]) -> _Spans:
        """Lay out spans one after the other."""
        return _Spans(spans, [end - 1 for end in accumulate(len(span.tokens) for span in spans)])

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the whole cache of one slot to another slot.

        Args:
            count: Number of tokens in the source slot. It is not used, because a state cannot be cut.
        """
        self._caches[target] = copy.deepcopy(self._caches[source])

    def run(self, trunk: nn.Module, feed: _Spans) -> Tensor:
        """Feed the spans to the model and return hidden states, [tokens of all spans, hidden]."""
        return torch.cat([self._read(trunk, span) for span in feed.spans])

    def _read(self, trunk: nn.Module, span: Span) -> Tensor:
        tokens_1L = torch.tensor([span.tokens], device=self.device)
        cache_arguments = self._caches[span.slot] if span.start else {}
        positions_1L = torch.arange(span.start, span.start + len(span.tokens), device=self.device)[None]
        output = trunk(input_ids=tokens_1L, position_ids=positions_1L, use_cache=True, **cache_arguments)
        self._caches[span.slot] = {name: output[name] for name in _NAMES if output.get(name) is not None}
        states: Tensor = output.last_hidden_state[0]
        return states


def make_cache(model: Any, slots: int, length: int) -> SlotCache | OwnCaches:
    """Return the fastest cache with which the model computes the same states as without one.

    The model's attention is replaced if its cache is a `SlotCache`.

    Args:
        model: A transformers model. It reads a few tokens as a test.
        length: Maximum number of tokens of a conversation.

    Raises:
        EngineError: The model cannot be read in parts.
    """
    device, config = next(model.parameters()).device, model.config.get_text_config()
    tokens = random.Random(0).choices(range(1, min(config.vocab_size, 256)), k=min(_PROBE, length))
    with torch.inference_mode():
        expected = hidden_states(trunk_of(model), torch.tensor([tokens], device=device))[0]
        if set(layer_kinds(config)) <= SlotCache.KINDS:
            cache = SlotCache(model.config, slots, length, device, compute_dtype(model))
            old_attention, config._attn_implementation = config._attn_implementation, ATTENTION
            if _agrees(cache, trunk_of(model), tokens, expected):
                return cache
            config._attn_implementation = old_attention
        caches = OwnCaches(slots, device)
        if _agrees(caches, trunk_of(model), tokens, expected):
            return caches
    raise EngineError(
        f"the torch engine reads a conversation in parts, but then {type(model).__name__} of this version of "
        "transformers computes different results: use the engine vllm"
    )


def _agrees(cache: SlotCache | OwnCaches, trunk: nn.Module, tokens: Sequence[int], expected: Tensor) -> bool:
    """Return whether reading in parts gives the expected states, [tokens, hidden].

    The median error over the tokens is compared, because rounding can route single tokens to other experts.
    """
    states = []
    try:
        for start, end in pairwise(sorted({0, len(tokens) // 2, len(tokens) - 1, len(tokens)})):
            feed: Any = cache.lay_out([Span(0, start, tokens[start:end])])
            states.append(cache.run(trunk, feed)[: end - start])
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    distances = (torch.cat(states) - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return bool(distances[len(tokens) // 2 :].median() < (0.01 if expected.dtype == torch.float32 else 0.05))
