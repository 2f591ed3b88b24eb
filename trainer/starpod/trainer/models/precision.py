"""Computation in bfloat16 with weights in float32.

An RL update changes a weight by less than the precision of bfloat16, so most bfloat16 weights would never change.
Trained weights are therefore float32, and are rounded for each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from starpod.trainer.models.logprobs import LinearHead
from starpod.trainer.models.trunk import head_of, unwrapped


def fast_dtype(device: str) -> Literal["float32", "bfloat16"]:
    """Return bfloat16 if the configured device has instructions for it, otherwise float32, which is then far faster."""
    if device != "cpu" and torch.cuda.is_available():
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return "bfloat16" if has_bfloat16 else "float32"


def compute_in(model: nn.Module, dtype: torch.dtype, *, float32_logits: bool = False) -> None:
    """Make passes inside `computing` run in `dtype`, independent of the type of the weights.

    Args:
        dtype: Type of inputs of matrix products and of the residual stream.
        float32_logits: Whether the output layer runs in float32; see `output_layer`.
    """
    base_model = unwrapped(model)
    base_model.compute_dtype, base_model.float32_logits = dtype, float32_logits

    def round_states(module: nn.Module, arguments: Any, states: Tensor) -> Tensor:
        return states.to(dtype)

    # Autocast only rounds the inputs of matrix products. Rounding the embeddings also puts the residual stream in
    # `dtype`, as in an engine with rounded weights.
    base_model.get_input_embeddings().register_forward_hook(round_states)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the type in which passes run: the one set by `compute_in`, otherwise the type of the weights."""
    dtype: torch.dtype = getattr(unwrapped(model), "compute_dtype", None) or next(model.parameters()).dtype
    return dtype


def output_layer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states to logits, in float32 if `compute_in` chose that.

    Engine and trainer sum bfloat16 products in different orders. Most of the difference between their
    log-probabilities comes from the output layer (MiniMax-M1, arXiv 2506.13585).
    """
    head: Any = head_of(model)
    if not getattr(unwrapped(model), "float32_logits", False):
        layer: Callable[[Tensor], Tensor] = head
        return layer

    def logits(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    return logits


def linear_head(model: nn.Module) -> LinearHead | None:
    """Return the weight of the output layer, and the type in which `output_layer` computes.

    None if the layer is more than one product, or if FSDP gathers its weight only for a call of the layer.
    """
    head = head_of(model)
    # Adapters and FSDP give the layer another class.
    if type(head) is not nn.Linear:
        return None
    dtype = torch.float32 if getattr(unwrapped(model), "float32_logits", False) else compute_dtype(model)
    return LinearHead(head.weight, head.bias, dtype)


def kept_in_float32(model: nn.Module) -> set[int]:
    """Return the Python ids of the weights that are not rounded, which belong to a float32 output layer."""
    float32 = getattr(unwrapped(model), "float32_logits", False)
    return {id(parameter) for parameter in head_of(model).parameters()} if float32 else set()


def computing(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which the model runs in its computation type. Gradients keep the type of the weights."""
    parameter, dtype = next(model.parameters()), compute_dtype(model)
    if all(weight.dtype == dtype for weight in model.parameters()):
        return nullcontext()
    # Each weight is used once per pass, so a cache of rounded weights would only take memory.
    return torch.autocast(parameter.device.type, dtype=dtype, cache_enabled=False)


def round_weights(model: nn.Module) -> None:
    """Convert the weights to the type in which the model computes. Only for models that are no longer trained."""
    values = {parameter: parameter.data for parameter in model.parameters() if id(parameter) in kept_in_float32(model)}
    model.to(compute_dtype(model))
    for parameter, data in values.items():
        parameter.data = data
