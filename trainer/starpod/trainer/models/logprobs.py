"""Log-probabilities and entropies of sampled tokens, with few passes over the logits and bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class _TokenLogprobs(torch.autograd.Function):
    """Log softmax at the tokens and the entropy, with a backward pass that keeps a single copy of the logits.

    With probabilities p and entropy H, d log p[token] / d logits = onehot(token) - p, and
    d H / d logits = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        log_p = torch.log_softmax(logits_NV, -1)
        chosen = log_p.gather(-1, tokens_N[:, None])[:, 0]
        entropy_N = (log_p.exp() * log_p).sum(-1).neg_() if entropy else None
        ctx.save_for_backward(log_p, tokens_N, entropy_N)
        return chosen, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        log_p, tokens_N, entropy_N = ctx.saved_tensors
        chosen_gradient, entropy_gradient = gradients
        scale = torch.zeros_like(log_p[:, :1]) if chosen_gradient is None else -chosen_gradient[:, None]
        if entropy_gradient is None or entropy_N is None:
            out = log_p.exp().mul_(scale)
        else:
            # p (-g - gH (log p + H)); `scale` collects the terms that are equal for all entries of a row.
            scale = scale - (entropy_gradient * entropy_N)[:, None]
            out = torch.addcmul(scale, log_p, entropy_gradient[:, None], value=-1).mul_(log_p.exp())
        if chosen_gradient is not None:
            out.scatter_add_(1, tokens_N[:, None], chosen_gradient[:, None])
        return out, None, None


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float,
    entropy: bool,
    logits_at_once: int,
    vocabulary: int,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of tokens under softmax(head(hidden) / temperature), and entropies, in float32 nats.

    If [N, vocabulary] has more than `logits_at_once` entries, logits are computed in chunks of rows. They are then
    recomputed for the gradient instead of being kept.
    """

    def part(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        result: tuple[Tensor, Tensor | None] = _TokenLogprobs.apply(logits, tokens, entropy)  # type: ignore[no-untyped-call]
        return result

    rows = max(1, logits_at_once // vocabulary)
    if len(tokens_N) <= rows:
        return part(hidden_NH, tokens_N)
    parts = []
    for hidden, tokens in zip(torch.split(hidden_NH, rows), torch.split(tokens_N, rows), strict=True):
        keep = torch.is_grad_enabled()
        parts.append(checkpoint(part, hidden, tokens, use_reentrant=False) if keep else part(hidden, tokens))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None
