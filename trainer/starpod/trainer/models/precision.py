"""Computing in bfloat16 with weights in float32.

A step of reinforcement learning moves a weight by less than bfloat16 can show: kept in it, most weights would never
move. So what is trained is kept in float32, and rounded anew for each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from starpod.trainer.models.trunk import head_of, plain


def fast_dtype(device: str) -> Literal["float32", "bfloat16"]:
    """bfloat16 where a device has instructions for its products; without them it is many times slower than float32.

    device: as in the configuration.
    """
    if device != "cpu" and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return "bfloat16" if fast else "float32"


def compute_in(model: nn.Module, dtype: torch.dtype, *, float32_logits: bool = False) -> None:
    """Makes passes under `computing` run in `dtype`, whatever the weights are kept in.

    float32_logits: all but the output layer, see `output_layer`.
    """
    inner = plain(model)
    inner.compute_dtype, inner.float32_logits = dtype, float32_logits

    def round_states(module: nn.Module, arguments: Any, states: Tensor) -> Tensor:
        return states.to(dtype)

    # Autocast rounds what goes into products. The sums of the residual stream follow their first term, and so are those
    # of an engine that holds rounded weights.
    inner.get_input_embeddings().register_forward_hook(round_states)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that passes run in: as `compute_in` set it, else the type of the weights."""
    dtype: torch.dtype = getattr(plain(model), "compute_dtype", None) or next(model.parameters()).dtype
    return dtype


def output_layer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What makes logits of hidden states: in float32 where `compute_in` said so, else in the type of the pass.

    Engine and trainer add up a product of bfloat16 in different orders; most of what their log-probabilities differ by
    comes of the last one (MiniMax-M1, arXiv 2506.13585).
    """
    head: Any = head_of(model)
    if not getattr(plain(model), "float32_logits", False):
        layer: Callable[[Tensor], Tensor] = head
        return layer

    def logits(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    return logits


def kept_in_float32(model: nn.Module) -> set[int]:
    """Ids of the weights that are not rounded to what the model computes in: those of a float32 output layer."""
    float32 = getattr(plain(model), "float32_logits", False)
    return {id(parameter) for parameter in head_of(model).parameters()} if float32 else set()


def computing(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which the model computes in its type, and keeps gradients in that of its weights."""
    parameter, dtype = next(model.parameters()), compute_dtype(model)
    if all(each.dtype == dtype for each in model.parameters()):
        return nullcontext()
    # Every weight is read once in a pass: a cache of rounded ones would only hold them all at a time.
    return torch.autocast(parameter.device.type, dtype=dtype, cache_enabled=False)


def round_weights(model: nn.Module) -> None:
    """Keeps the weights in what the model computes in: for models that are no longer trained."""
    kept = {parameter: parameter.data for parameter in model.parameters() if id(parameter) in kept_in_float32(model)}
    model.to(compute_dtype(model))
    for parameter, data in kept.items():
        parameter.data = data
