"""The two parts of a causal language model: the trunk computes hidden states, the head computes logits from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def unwrapped(model: nn.Module) -> Any:
    """Return the model of transformers inside a wrapper of adapters. Its layers still contain the adapters."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(model, "get_base_model") else model


def trunk_of(model: nn.Module) -> nn.Module:
    """Return the decoder without its output layer."""
    trunk: nn.Module = unwrapped(model).base_model
    return trunk


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer of a model's configuration, in the words of transformers."""
    text = config.get_text_config()
    if kinds := getattr(text, "layer_types", None):
        return list(kinds)
    attention = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kind = attention if getattr(text, "num_attention_heads", None) else "state_space"
    return [kind] * text.num_hidden_layers


def head_of(model: nn.Module) -> nn.Module:
    """Return the output layer, from hidden states to logits."""
    head: nn.Module = unwrapped(model).get_output_embeddings()
    return head


def hidden_states(trunk: nn.Module, tokens_BL: Tensor, positions_BL: Tensor | None = None, mask: Any = None) -> Tensor:
    """Return hidden states [B, L, hidden] of right-padded sequences. Causal attention needs no mask for right padding.

    Args:
        positions_BL: Position of each token; None: positions count from 0.
        mask: [B, 1, L, L], or one such mask for each kind of layers. True if a query sees a key; None: the causal mask.
    """
    states: Tensor = trunk(
        input_ids=tokens_BL, position_ids=positions_BL, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return states


@torch.no_grad()
def splits_cleanly(model: nn.Module) -> bool:
    """Return whether the head on the trunk's states gives the model's logits. Some models scale or cap them."""
    model_device = next(model.parameters()).device
    tokens = torch.tensor([[1, 2, 3]], device=model_device)
    whole_logits = unwrapped(model)(input_ids=tokens, use_cache=False).logits
    split_logits = head_of(model)(hidden_states(trunk_of(model), tokens))
    return bool(torch.allclose(whole_logits.float(), split_logits.float(), rtol=1e-2, atol=1e-2))
