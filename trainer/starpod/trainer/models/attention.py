"""Attention in blocks of queries: each block reads only the keys that its mask shows.

Rows that are folded (folding.py) see a small part of the keys: their common prefix and themselves. The CPU kernel of
torch computes every masked product, and in an update of a small model attention then takes longer than all linear
layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from starpod.trainer.models.trunk import unwrapped

SDPA = "sdpa"
BLOCKS = "starpod_blocks"
"""Name of this attention in the configuration of a model."""

_BLOCK = 128
"""Queries per block. With 64 or 256, the two passes take up to a quarter longer (1,024 tokens, bfloat16)."""

_SHORTEST = 512
"""Minimum number of queries. For fewer, the blocks cost about as much as they save."""


def attend_in_blocks(model: nn.Module) -> None:
    """Let a model whose attention is torch's use blocks on the CPU."""
    config = unwrapped(model).config.get_text_config()
    if config._attn_implementation == SDPA:
        config._attn_implementation = BLOCKS


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    length = query.shape[2]
    if attention_mask is None or attention_mask.dtype != torch.bool or length < _SHORTEST or query.device.type != "cpu":
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    outputs = []
    for start in range(0, length, _BLOCK):
        mask = attention_mask[:, :, start : start + _BLOCK]
        seen_K = mask.flatten(0, 2).any(0).nonzero()[:, 0]
        output, _ = sdpa_attention_forward(
            module,
            query[:, :, start : start + _BLOCK],
            key.index_select(2, seen_K),
            value.index_select(2, seen_K),
            mask.index_select(3, seen_K),
            **kwargs,
        )
        outputs.append(output)
    return torch.cat(outputs, 1), None


AttentionInterface.register(BLOCKS, _attend)
AttentionMaskInterface.register(BLOCKS, sdpa_mask)
