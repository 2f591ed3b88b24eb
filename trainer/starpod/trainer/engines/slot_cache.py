"""Cache of keys and values of many conversations, one slot each, and attention over it.

Every token that is fed is one row: a prompt of twenty tokens has twenty rows. On a CPU with one thread, each sequence
of an attention call has a single query. A token's result is then independent, bit for bit, of the other rows in the
batch, of how its prompt was split, and of whether the beginning was cached. This works because the number of rows does
not change the result of a row, and the number of masked keys does not change the result of a single query. Several
queries in one sequence would change it. Rows and keys are padded to whole vectors, so that no row falls into a loop's
remainder.

With several threads, tensors are split at arbitrary places and results differ anyway. Queries are then batched as on a
GPU, which is several times as fast in bfloat16.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from starpod.trainer.models.folding import common_prefix
from starpod.trainer.models.trunk import layer_kinds


class Slots:
    """Allocator of slots. A slot is free, busy with a reply, or idle: kept for a conversation until needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._idle: OrderedDict[str, int] = OrderedDict()  # conversation -> slot, the longest unused first
        self._tokens: list[Sequence[int]] = [()] * count  # the cached tokens of each idle slot

    def take(self, conversation: str, prompt: Sequence[int], *, rewinds: bool = True) -> tuple[int, int] | None:
        """Return a slot for a reply and the number of prompt tokens cached there; None if all slots are busy.

        The last token never counts as cached, because the model must read it to sample the next one.

        Args:
            conversation: Name of the conversation; "": it has no slot to continue.
            prompt: Token ids of the whole context.
            rewinds: Whether the cache can be cut at any token. Otherwise all tokens in the slot count, or none.
        """
        slot = self._idle.pop(conversation, None)
        if slot is not None:
            cached_count = common_prefix(self._tokens[slot], prompt[:-1])
            return slot, cached_count if rewinds or cached_count == len(self._tokens[slot]) else 0
        if self._free:
            # Take the lowest slot to keep ranges short: attention is computed over whole ranges.
            return heapq.heappop(self._free), 0
        if self._idle:
            return self._idle.popitem(last=False)[1], 0
        return None

    def give_back(self, slot: int, conversation: str, tokens: Sequence[int]) -> None:
        """Release the slot of a finished reply.

        Args:
            conversation: Conversation for which the cached tokens are kept; "": they are dropped.
            tokens: Ids of the tokens in the slot.
        """
        if not conversation:
            heapq.heappush(self._free, slot)
            return
        self.forget(conversation)
        self._tokens[slot] = tokens
        self._idle[conversation] = slot

    def forget(self, conversation: str) -> None:
        """Free the idle slot of a conversation, if there is one."""
        slot = self._idle.pop(conversation, None)
        if slot is not None:
            heapq.heappush(self._free, slot)

    def forget_all(self) -> None:
        """Free all idle slots."""
        for conversation in list(self._idle):
            self.forget(conversation)


ATTENTION = "starpod_slots"
"""Name under which `_attention` is registered in transformers."""

VECTOR = 32
"""Rows and keys are padded to multiples of this."""

_DENSE = 4
"""Single tokens are computed in one call over a range of slots if at least one in 4 of these slots has a token. One
call is cheaper than a call per slot."""


def pad(length: int) -> int:
    """Round up to a multiple of VECTOR."""
    return -(-length // VECTOR) * VECTOR


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens to feed to `slot`, from position `start` on."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Block:
    """Attention of the rows from `first` up to `last` (exclusive) over the first `keys` keys of their slots."""

    first: int
    last: int
    slot: int
    """The slot of all rows; in a dense block, the slot of the first row, and each following row has the next slot."""
    keys: int
    mask: Tensor
    """Mask to add to the attention scores, [rows, keys]."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Spans laid out as R rows."""

    tokens_R1: Tensor
    positions_R1: Tensor
    last: list[int]
    """Row of the last token of each span."""
    writes: Tensor
    """Flat indices in the cache at which each row's keys are written, [R * key-value heads]."""
    blocks: dict[int, tuple[_Block | None, list[_Block]]]
    """(dense block, other blocks) for each width of a sliding window; 0 is full attention. The dense block covers a
    range of slots with one row each, and is None if there is none. The other blocks have the rows of one span each."""


def cache_shape(model_config: Any, slots: int, length: int) -> tuple[int, int, int, int, int, int]:
    """Return the cache's shape: layers, 2 (keys and values), slots + 1, key-value heads, tokens, width of a head.

    All layers count as full attention, and a model without attention counts as one head of the model's width.

    Args:
        slots: Number of conversations. One more slot is for padding rows.
        length: Maximum number of tokens of a conversation, which is padded to a multiple of VECTOR.
    """
    config = model_config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", None) or 1
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads: int = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, 2, slots + 1, key_value_heads, pad(length), width


class SlotCache:
    """Cache with the interface of transformers, which calls `update` for each layer.

    It has one slot for padding rows in addition to `slots` conversations of up to `length` tokens. Layers with a
    sliding window keep all tokens too, and mask those before the window.
    """

    KINDS = frozenset({"full_attention", "sliding_attention"})
    """Kinds of layers that can use this cache."""

    rewinds = True
    """Whether a conversation can continue from any of its cached tokens, not only from the last one."""

    def __init__(self, config: Any, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        config = config.get_text_config()
        self.slots = slots
        self.length = pad(length)
        self.heads = config.num_attention_heads
        window = min(getattr(config, "sliding_window", None) or self.length, self.length) % self.length
        self.windows = [window if kind == "sliding_attention" else 0 for kind in layer_kinds(config)]
        shape = cache_shape(config, slots, length)
        self.key_value_heads, self.width = shape[3], shape[5]
        self.device = device
        # Masked values are still multiplied by 0, so they must be finite.
        self.layers = torch.zeros(shape, device=device, dtype=dtype)
        self.one_query = device.type == "cpu" and torch.get_num_threads() == 1
        self._head_offsets = torch.arange(self.key_value_heads, device=device) * self.length
        self._places = torch.arange(self.length, device=device)
        self._writes = torch.empty(0, dtype=torch.int64)

    def lay_out(self, spans: Sequence[Span]) -> Feed:
        """Lay out spans as rows: first a dense range of slots with one row each, if it saves time, then other spans."""
        singles = [index for index, span in enumerate(spans) if len(span.tokens) == 1]
        low = min((spans[index].slot for index in singles), default=0)
        high = max((spans[index].slot + 1 for index in singles), default=0)
        width = high - low if len(singles) > 1 and len(singles) * _DENSE >= high - low else 0
        row_count = pad(width + sum(len(span.tokens) for span in spans) - (len(singles) if width else 0))
        tokens, positions, slots = [0] * row_count, [0] * row_count, [self.slots] * row_count
        last = [0] * len(spans)
        rows: list[tuple[int, int, int]] = []
        end = width
        for index, span in enumerate(spans):
            count = len(span.tokens)
            if width and count == 1:
                first = span.slot - low
            else:
                first, end = end, end + count
                rows.append((first, end, span.slot))
            tokens[first : first + count] = span.tokens
            positions[first : first + count] = range(span.start, span.start + count)
            slots[first : first + count] = [span.slot] * count
            last[index] = first + count - 1
        tensors = torch.tensor([tokens, positions, slots], device=self.device)
        tokens_R, positions_R, slots_R = tensors
        writes = (slots_R * (self.key_value_heads * self.length) + positions_R)[:, None] + self._head_offsets
        rows = [(0, width, low), *rows]
        keys = [pad(max(positions[first:last], default=0) + 1) for first, last, _ in rows]
        by_window = {}
        for window in {*self.windows}:
            masks = self._masks(positions_R, max(keys), window)
            dense, *blocks = [
                _Block(first, last, slot, key_count, masks[first:last, :key_count])
                for (first, last, slot), key_count in zip(rows, keys, strict=True)
            ]
            by_window[window] = dense if width else None, blocks
        return Feed(tokens_R[:, None], positions_R[:, None], last, writes.flatten(), by_window)

    def _masks(self, positions_R: Tensor, keys: int, window: int) -> Tensor:
        """Return causal masks to add to the scores of each row, [R, keys]. A window of 0 is full attention."""
        mask = self._places[:keys] > positions_R[:, None]
        if window:
            mask |= self._places[:keys] <= positions_R[:, None] - window
        zeros = torch.zeros(mask.shape, device=self.device, dtype=self.layers.dtype)
        return zeros.masked_fill_(mask, -torch.inf)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the entries of the first `count` tokens from one slot to another."""
        self.layers[:, :, target, :, :count] = self.layers[:, :, source, :, :count]

    def begin(self, feed: Feed) -> None:
        """Set the rows that the next calls of `update` write."""
        self._writes = feed.writes

    def run(self, trunk: nn.Module, feed: Feed) -> Tensor:
        """Feed the rows to a model whose attention is ATTENTION and return hidden states, [R, hidden]."""
        self.begin(feed)
        states: Tensor = trunk(
            input_ids=feed.tokens_R1,
            position_ids=feed.positions_R1,
            past_key_values=self,
            use_cache=True,
            slot_feed=feed,
            slot_cache=self,
        ).last_hidden_state
        return states[:, 0]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values, and return all slots' keys and values.

        Args:
            keys: Keys of the rows, [R, key-value heads, 1, width].
            values: Values of the rows, in the same shape.

        Returns:
            Keys and values of the layer, [slots + 1, key-value heads, tokens, width] each.
        """
        cached_keys, cached_values = self.layers[layer]
        for cache, new in ((cached_keys, keys), (cached_values, values)):
            cache.view(-1, self.width).index_copy_(0, self._writes, new.reshape(-1, self.width))
        return cached_keys, cached_values

    def attend(
        self, feed: Feed, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None
    ) -> Tensor:
        """Compute each row's attention over its slot.

        Args:
            feed: Layout of the R rows.
            query: Queries of the rows, [R, heads, 1, width].
            keys: Keys of all slots, as `update` returns them.
            values: Values of all slots, as `update` returns them.
            scale: Factor of the scores; None: 1 / sqrt(width).

        Returns:
            Attention outputs, [R, 1, heads, width].
        """
        dense, blocks = feed.blocks[self.windows[layer]]
        result = torch.zeros(query.shape[0], 1, self.heads, self.width, device=query.device, dtype=query.dtype)
        if dense is not None:
            result[dense.first : dense.last, 0] = self._range(dense, query, keys, values, scale)
        attend = self._one_query if self.one_query else self._many_queries
        for block in blocks:
            result[block.first : block.last, 0] = attend(block, query, keys, values, scale)
        return result

    def _range(self, block: _Block, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Compute attention for a dense range of slots, one row each."""
        rows, group_size = block.last - block.first, self.heads // self.key_value_heads
        query = query[block.first : block.last]
        keys, values = (tensor[block.slot : block.slot + rows, :, : block.keys] for tensor in (keys, values))
        if not self.one_query:
            query = query.reshape(rows, self.key_value_heads, group_size, self.width)
            mask = block.mask[:, None, None]
            result = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
            return result.reshape(rows, self.heads, self.width)
        if group_size > 1:
            # Heads that share keys must not become several queries of one sequence. Each key-value head becomes a
            # sequence instead, and its query heads become the heads.
            query = query.reshape(rows * self.key_value_heads, group_size, 1, self.width)
            keys, values = (tensor.flatten(0, 1)[:, None].expand(-1, group_size, -1, -1) for tensor in (keys, values))
        mask = block.mask if group_size == 1 else block.mask.repeat_interleave(self.key_value_heads, 0)
        result = scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None, None], scale=scale)
        return result.reshape(rows, self.heads, self.width)

    def _one_query(self, block: _Block, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Compute attention for rows that use the same slot and have one query each.

        The rows share the slot's keys, so the kernel gets them as if they were further heads.
        """
        rows, group_size = block.last - block.first, self.heads // self.key_value_heads
        query = query[block.first : block.last].reshape(rows, self.key_value_heads, group_size, self.width)
        query = query.transpose(0, 1).reshape(self.key_value_heads, rows * group_size, 1, self.width)
        keys, values = (
            tensor[block.slot][:, None, : block.keys].expand(-1, rows * group_size, -1, -1) for tensor in (keys, values)
        )
        mask = block.mask if group_size == 1 else block.mask.repeat_interleave(group_size, 0)
        result = scaled_dot_product_attention(query, keys, values, attn_mask=mask[None, :, None], scale=scale)
        result = result.reshape(self.key_value_heads, rows, group_size, self.width).transpose(0, 1)
        return result.reshape(rows, self.heads, self.width)

    def _many_queries(self, block: _Block, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Compute attention for rows of one slot by treating their queries as one sequence."""
        group_size = self.heads // self.key_value_heads
        query = query[block.first : block.last, :, 0].transpose(0, 1)[None]
        keys, values = (
            tensor[block.slot : block.slot + 1, :, : block.keys].repeat_interleave(group_size, 1)
            for tensor in (keys, values)
        )
        result = scaled_dot_product_attention(query, keys, values, attn_mask=block.mask[None, None], scale=scale)
        return result[0].transpose(0, 1)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    slot_feed: Feed,
    slot_cache: SlotCache,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise TypeError("attention with capped scores or sinks cannot use the cache of slots")
    return slot_cache.attend(slot_feed, module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
