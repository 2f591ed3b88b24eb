"""The two halves of a causal language model: what makes hidden states, and what makes logits of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def plain(model: nn.Module) -> Any:
    """The transformers model itself, where adapters are wrapped around it. Its layers hold the adapters."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else model


def trunk_of(model: nn.Module) -> nn.Module:
    """The decoder without its output layer."""
    trunk: nn.Module = plain(model).base_model
    return trunk


def head_of(model: nn.Module) -> nn.Module:
    """The output layer: hidden states to logits."""
    head: nn.Module = plain(model).get_output_embeddings()
    return head


def hidden_states(
    trunk: nn.Module, tokens_BL: Tensor, positions_BL: Tensor | None = None, mask_B1LL: Tensor | None = None
) -> Tensor:
    """[B, L, hidden] of right-padded sequences. Causal attention never looks right, so padding needs no mask.

    positions_BL: None counts from 0. mask_B1LL: True where a query sees a key; None: all that is to its left.
    """
    states: Tensor = trunk(
        input_ids=tokens_BL, position_ids=positions_BL, attention_mask=mask_B1LL, use_cache=False
    ).last_hidden_state
    return states


@torch.no_grad()
def splits_cleanly(model: nn.Module) -> bool:
    """Whether the output layer on the trunk's states is all that the model does. Some scale or cap their logits."""
    model_device = next(model.parameters()).device
    tokens = torch.tensor([[1, 2, 3]], device=model_device)
    whole = plain(model)(input_ids=tokens, use_cache=False).logits
    halves = head_of(model)(hidden_states(trunk_of(model), tokens))
    return bool(torch.allclose(whole.float(), halves.float(), rtol=1e-2, atol=1e-2))
