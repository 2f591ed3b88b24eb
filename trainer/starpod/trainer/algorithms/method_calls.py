"""Calls of an estimator or a loss from a user's file. Each call is checked; user_methods.py describes the functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeGuard

import torch
from torch import Tensor

from starpod.trainer.algorithms.losses import PolicyLoss
from starpod.trainer.configuration.user_file import UserFunction, load
from starpod.trainer.data.batch import RolloutBatch


def estimate_advantages(
    source: str, parameters: Mapping[str, Any], rollout: RolloutBatch, rewards_BT: Tensor
) -> Tensor:
    """Return the advantages [B, T] that an estimator returns.

    Args:
        source: `algorithm.advantage`, FILE.py:NAME.
        parameters: Further keyword arguments of the function.

    Raises:
        ConfigError: The function cannot be loaded.
        UserCodeError: It failed, wrote into its arguments, or returned something wrong.
    """
    function = UserFunction(f"algorithm.advantage {source}", load("algorithm.advantage", source))
    tensors = {item.name: value for item in fields(rollout) if isinstance(value := getattr(rollout, item.name), Tensor)}
    with _expect_unchanged(function, {**tensors, "rewards_BT": rewards_BT}):
        advantages_BT = function("", rollout, rewards_BT, **parameters)
    if not _fits(advantages_BT, rollout.mask_BT):
        raise function.refuse(
            f"must return a tensor of one finite advantage per token, {_size(rollout.mask_BT)}; it returned "
            f"{_show(advantages_BT)}"
        )
    if _has_nan(advantages_BT, rollout.mask_BT) and not _has_nan(rewards_BT, rollout.mask_BT):
        raise function.refuse(f"must return finite advantages; it returned {_show(advantages_BT, rollout.mask_BT)}")
    return advantages_BT.detach()


def compute_loss(source: str, parameters: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> PolicyLoss:
    """Return the loss of each token that a loss function returns.

    Args:
        source: `algorithm.loss`, FILE.py:NAME.
        parameters: Further keyword arguments of the function.
        inputs: Its arguments, those of `LossInputs`.

    Raises:
        ConfigError: The function cannot be loaded.
        UserCodeError: It failed, wrote into its arguments, or returned something wrong.
    """
    function = UserFunction(f"algorithm.loss {source}", load("algorithm.loss", source))
    *tensors, mask_BT, turns_BT = inputs.values()
    logprobs_BT = tensors[0]
    with _expect_unchanged(function, inputs):
        loss = function("", *tensors, mask_BT=mask_BT, turns_BT=turns_BT, **parameters)
    results = {item.name: getattr(loss, item.name, None) for item in fields(PolicyLoss)}
    per_token_BT, gradient_BT = results["per_token_BT"], None
    has_shape = all(isinstance(value, Tensor) and value.shape == mask_BT.shape for value in results.values())
    if has_shape and _fits(per_token_BT, mask_BT) and per_token_BT.requires_grad:
        # The graph ends at logprobs_BT, so that this does not go through the model.
        (gradient_BT,) = torch.autograd.grad(
            per_token_BT[mask_BT].sum(), logprobs_BT, retain_graph=True, allow_unused=True
        )
    if gradient_BT is None and logprobs_BT.requires_grad:
        returned = ", ".join(f"{name} {_show(value)}" for name, value in results.items())
        raise function.refuse(
            f"must return a PolicyLoss of tensors {_size(mask_BT)}, whose per_token_BT depends on logprobs_BT; it "
            f"returned {returned}"
        )
    if not any(_has_nan(tensor, mask_BT) for tensor in tensors):
        for name, values in (("losses", per_token_BT), ("gradients", gradient_BT)):
            if values is not None and _has_nan(values, mask_BT):
                raise function.refuse(
                    f"must return finite losses with finite gradients; its {name} are {_show(values, mask_BT)}"
                )
    return loss  # type: ignore[no-any-return]


@contextmanager
def _expect_unchanged(function: UserFunction, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise UserCodeError if the function writes into its arguments, which other steps of the update read."""
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    for name, copy in copies.items():
        tensor = tensors[name].detach()
        if tensor.shape != copy.shape or not ((tensor == copy) | (copy != copy)).all():
            raise function.refuse(f"must not write into its argument {name}; work on {name}.clone()")


def _fits(value: Any, mask_BT: Tensor) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of floating-point numbers with the shape of the mask, on its device."""
    if not isinstance(value, Tensor) or value.shape != mask_BT.shape:
        return False
    return value.is_floating_point() and value.device == mask_BT.device


def _has_nan(values_BT: Tensor, mask_BT: Tensor) -> bool:
    return not bool(values_BT[mask_BT].isfinite().all())


def _size(mask_BT: Tensor) -> str:
    rows, columns = mask_BT.shape
    return f"[{rows}, {columns}] for {rows} episodes of at most {columns} tokens, on {mask_BT.device}"


def _show(value: Any, mask_BT: Tensor | None = None) -> str:
    """Describe a value on one line. mask_BT: count the values in the mask that are not finite."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if mask_BT is not None:
        return f"NaN or infinite at {int((~value.isfinite() & mask_BT).sum())} of {int(mask_BT.sum())} sampled tokens"
    detached = "" if value.requires_grad else ", detached"
    return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}{detached}"
