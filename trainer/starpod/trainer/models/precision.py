"""Computing in bfloat16 with weights in float32.

A step of reinforcement learning moves a weight by less than bfloat16 can show: kept in it, most weights would never
move. So what is trained is kept in float32, and rounded anew for each pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from starpod.trainer.models.trunk import plain


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes passes under `computing` run in `dtype`, whatever the weights are kept in."""
    inner = plain(model)
    inner.compute_dtype = dtype

    def round_states(module: nn.Module, arguments: Any, states: Tensor) -> Tensor:
        return states.to(dtype)

    # Autocast rounds what goes into products. The sums of the residual stream follow their first term, and so are those
    # of an engine that holds rounded weights.
    inner.get_input_embeddings().register_forward_hook(round_states)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that passes run in: as `compute_in` set it, else the type of the weights."""
    dtype: torch.dtype = getattr(plain(model), "compute_dtype", None) or next(model.parameters()).dtype
    return dtype


def computing(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which the model computes in its type, and keeps gradients in that of its weights."""
    parameter, dtype = next(model.parameters()), compute_dtype(model)
    if dtype == parameter.dtype:
        return nullcontext()
    # Every weight is read once in a pass: a cache of rounded ones would only hold them all at a time.
    return torch.autocast(parameter.device.type, dtype=dtype, cache_enabled=False)


def round_weights(model: nn.Module) -> None:
    """Keeps the weights in what the model computes in: for models that are no longer trained."""
    model.to(compute_dtype(model))
