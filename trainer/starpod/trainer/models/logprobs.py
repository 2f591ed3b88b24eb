"""Log-probabilities and entropies of sampled tokens, with few passes over the logits and bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from starpod.trainer.models.masks import masked


class LinearHead(NamedTuple):
    """An output layer that is one matrix product."""

    weight_VH: Tensor
    bias_V: Tensor | None
    dtype: torch.dtype
    """Type in which the product is computed."""


class _TokenLogprobs(torch.autograd.Function):
    """Log softmax at the tokens and the entropy, with a backward pass that keeps a single copy of the logits.

    With probabilities p and entropy H, d log p[token] / d logits = onehot(token) - p, and
    d H / d logits = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # the gradient of an unused entropy is None, and costs nothing
        log_p = torch.log_softmax(logits_NV, -1)
        logprobs_N = log_p.gather(-1, tokens_N[:, None])[:, 0]
        entropy_N = (log_p.exp() * log_p).sum(-1).neg_() if entropy else None
        ctx.save_for_backward(log_p, tokens_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        log_p, tokens_N, entropy_N = ctx.saved_tensors
        chosen_gradient, entropy_gradient = gradients
        scale = torch.zeros_like(log_p[:, :1]) if chosen_gradient is None else -chosen_gradient[:, None]
        if entropy_gradient is None or entropy_N is None:
            logits_gradient = log_p.exp().mul_(scale)
        else:
            # p (-g - gH (log p + H)); `scale` collects the terms that are equal for all entries of a row.
            scale = scale - (entropy_gradient * entropy_N)[:, None]
            logits_gradient = torch.addcmul(scale, log_p, entropy_gradient[:, None], value=-1).mul_(log_p.exp())
        if chosen_gradient is not None:
            logits_gradient.scatter_add_(1, tokens_N[:, None], chosen_gradient[:, None])
        return logits_gradient, None, None


class _SlicedLogprobs(torch.autograd.Function):
    """_TokenLogprobs together with the output layer, by slices of the vocabulary.

    The forward pass keeps a running maximum and running sums (online softmax, arXiv 1805.02867), the backward pass
    computes the logits again. No [N, V] tensor exists in any type. Slices of rows would be slower: each would round the
    whole weight and add to its whole gradient, which takes longer than the products for a vocabulary of 150,000.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        temperature: float,
        entropy: bool,
        width: int,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.width = temperature, width
        count = len(tokens_N)
        peak_N = torch.full((count,), -torch.inf, device=hidden_NH.device)
        chosen_N, total_N, weighted_N = (torch.zeros_like(peak_N) for _ in range(3))
        for start, logits in _slices(hidden_NH, weight_VH, bias_V, temperature, width):
            chosen_N += _take(logits, tokens_N - start)
            old_N, peak_N = peak_N, torch.maximum(peak_N, logits.amax(-1))
            # Sums so far are relative to the old maximum. Before the first slice they are 0, and so is the factor.
            factor_N = (old_N - peak_N).exp()
            if entropy:
                shift_N = torch.where(total_N > 0, old_N - peak_N, 0.0)
                weighted_N = (weighted_N + total_N * shift_N) * factor_N
            p = logits.sub_(peak_N[:, None]).exp()
            total_N = total_N * factor_N + p.sum(-1)
            if entropy:
                weighted_N += p.mul_(logits).sum(-1)
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N if entropy else None
        normaliser_N = peak_N + log_total_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, tokens_N, normaliser_N, entropy_N)
        return chosen_N - normaliser_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, tokens_N, normaliser_N, entropy_N = ctx.saved_tensors
        chosen_gradient, entropy_gradient = gradients
        g_N = torch.zeros_like(normaliser_N) if chosen_gradient is None else chosen_gradient
        scale_N = -g_N if entropy_gradient is None else -g_N - entropy_gradient * entropy_N
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        weight_gradient = torch.empty_like(weight_VH) if needs_weight else None
        bias_gradient = torch.empty_like(bias_V) if needs_bias else None
        for start, logits in _slices(hidden_NH, weight_VH, bias_V, ctx.temperature, ctx.width):
            entries = slice(start, start + logits.shape[1])
            log_p = logits.sub_(normaliser_N[:, None])
            if entropy_gradient is None:
                logits_gradient = log_p.exp_().mul_(scale_N[:, None])
            else:
                p = log_p.exp()
                logits_gradient = log_p.mul_(-entropy_gradient[:, None]).add_(scale_N[:, None]).mul_(p)
                del p
            _add(logits_gradient, tokens_N - start, g_N)
            logits_gradient = logits_gradient.div_(ctx.temperature).to(hidden_NH.dtype)
            if hidden_gradient is not None:
                hidden_gradient += logits_gradient @ weight_VH[entries].to(logits_gradient.dtype)
            if weight_gradient is not None:
                weight_gradient[entries] = logits_gradient.T @ hidden_NH
            if bias_gradient is not None:
                bias_gradient[entries] = logits_gradient.sum(0)
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(hidden_NH.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None, None


def _slices(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float, width: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first entry of each slice of the vocabulary, and its logits in float32, which may be overwritten."""
    for start in range(0, len(weight_VH), width):
        logits = hidden_NH @ weight_VH[start : start + width].to(hidden_NH.dtype).T
        if bias_V is not None:
            logits += bias_V[start : start + width].to(logits.dtype)
        yield start, logits.float().div_(temperature)
        del logits


def _take(values_NV: Tensor, places_N: Tensor) -> Tensor:
    """Return each row's value at its place, or 0 if the place is outside the row."""
    inside_N = (places_N >= 0) & (places_N < values_NV.shape[1])
    return torch.where(inside_N, values_NV.gather(1, torch.where(inside_N, places_N, 0)[:, None])[:, 0], 0.0)


def _add(values_NV: Tensor, places_N: Tensor, added_N: Tensor) -> None:
    """Add a number to each row at its place, unless the place is outside the row."""
    inside_N = (places_N >= 0) & (places_N < values_NV.shape[1])
    values_NV.scatter_add_(1, torch.where(inside_N, places_N, 0)[:, None], torch.where(inside_N, added_N, 0.0)[:, None])


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    tokens_N: Tensor,
    *,
    linear: LinearHead | None = None,
    temperature: float,
    entropy: bool,
    logits_at_once: int,
    vocabulary: int,
    bits_NW: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of tokens under softmax(head(hidden) / temperature), and entropies, in float32 nats.

    Logits are computed in slices if they have more than `logits_at_once` entries in total, or if the head's weight must
    be rounded and has more. Slices divide the vocabulary, or the rows if `linear` is None. They are not kept, but
    computed again for the gradient.

    Args:
        head: Returns the logits [N, V] of hidden states.
        hidden_NH: Hidden states at the contexts of the tokens.
        linear: Weight and bias of `head`; None if it is not a single matrix product.
        temperature: Divisor of the logits.
        entropy: Whether to compute entropies; otherwise they are None.
        logits_at_once: Maximum number of logits in memory.
        vocabulary: Number V of logits per row.
        bits_NW: Masks of the tokens that could follow, as in models/masks.py; None: all.

    Returns:
        Log-probabilities [N] and entropies [N].
    """

    def part(hidden: Tensor, tokens: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logits = head(hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        if bits is not None:
            logits = masked(logits, bits)
        result: tuple[Tensor, Tensor | None] = _TokenLogprobs.apply(logits, tokens, entropy)  # type: ignore[no-untyped-call]
        return result

    if linear is not None and bits_NW is None:
        is_rounded = linear.dtype != linear.weight_VH.dtype
        per_entry = max(len(tokens_N), hidden_NH.shape[1] if is_rounded else 0)
        if per_entry * vocabulary > logits_at_once:
            width = max(1, logits_at_once // per_entry)
            with torch.autocast(hidden_NH.device.type, enabled=False):
                sliced: tuple[Tensor, Tensor | None] = _SlicedLogprobs.apply(  # type: ignore[no-untyped-call]
                    hidden_NH.to(linear.dtype), linear.weight_VH, linear.bias_V, tokens_N, temperature, entropy, width
                )
            return sliced
    rows = max(1, logits_at_once // vocabulary)
    if len(tokens_N) <= rows:
        return part(hidden_NH, tokens_N, bits_NW)
    parts = []
    for start in range(0, len(tokens_N), rows):
        here = slice(start, start + rows)
        inputs = hidden_NH[here], tokens_N[here], None if bits_NW is None else bits_NW[here]
        parts.append(checkpoint(part, *inputs, use_reentrant=False) if torch.is_grad_enabled() else part(*inputs))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None
