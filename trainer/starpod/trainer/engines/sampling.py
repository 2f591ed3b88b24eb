"""Sampling of tokens from logits, each row with its own random stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_BLOCK = 32
"""Number of uniforms drawn at a time."""


class Uniforms:
    """Random numbers in [0, 1) for one reply, one per token. They depend only on the seed."""

    __slots__ = ("_drawn", "_generator", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: np.random.Generator | None = None
        self._drawn: list[float] = []

    def __getitem__(self, index: int) -> float:
        if self._generator is None:
            # A counter-based generator gives unrelated streams for neighbouring seeds.
            self._generator = np.random.Generator(np.random.Philox(key=self._seed % 2**128))
        while index >= len(self._drawn):
            self._drawn.extend(self._generator.random(_BLOCK).tolist())
        return self._drawn[index]


def draw(
    logits_NV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row and return the tokens and their log-probabilities in nats.

    A row's result does not depend on the other rows.

    Args:
        logits_NV: Logits, float32.
        temperatures: Divisors of the logits; 0 takes the likeliest token with probability 1.
        top_ps: Probability masses of nucleus sampling. Below 1, log-probabilities are those within the nucleus.
        uniforms: Numbers in [0, 1) at which the inverse cumulative distribution is evaluated.

    Raises:
        FloatingPointError: If the logits are not finite.
    """
    device = logits_NV.device
    if any(temperature != 1.0 for temperature in temperatures):
        divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
        logits_NV = logits_NV / divisors[:, None]
    log_p = torch.log_softmax(logits_NV, -1)
    p = torch.softmax(logits_NV, -1)
    if any(top_p < 1.0 for top_p in top_ps):
        mask = _nucleus(p, torch.tensor(top_ps, device=device, dtype=torch.float64))
        p = torch.where(mask, p, 0.0)
        # Do not renormalize rows without a cut, so that their values stay the same bit for bit.
        share = torch.where(mask.all(-1), 1.0, p.sum(-1))
        log_p = torch.where(mask, log_p - share.log()[:, None], -torch.inf)
    cumulative = p.cumsum(-1, dtype=torch.float64)
    target = torch.tensor(uniforms, device=device, dtype=torch.float64) * cumulative[:, -1]
    # Take the first token whose cumulative probability exceeds the target. It never has probability 0.
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    best_tokens = p.argmax(-1)
    # Rounding can put the target at or beyond the last cumulative probability.
    tokens = torch.where(tokens < p.shape[-1], tokens, best_tokens)
    logprobs = log_p.gather(-1, tokens[:, None])[:, 0]
    if any(temperature == 0.0 for temperature in temperatures):
        greedy = torch.tensor([temperature == 0.0 for temperature in temperatures], device=device)
        tokens = torch.where(greedy, best_tokens, tokens)
        logprobs = torch.where(greedy, 0.0, logprobs)
    if not torch.isfinite(cumulative[:, -1]).all():
        raise FloatingPointError("the policy's logits are not finite: its weights have diverged")
    return tokens, logprobs


def _nucleus(p: Tensor, top_p: Tensor) -> Tensor:
    """Return the mask of the smallest set of likeliest tokens with a total probability of at least `top_p`."""
    sorted_p, order = p.sort(stable=True, dim=-1, descending=True)
    before = sorted_p.cumsum(-1, dtype=torch.float64) - sorted_p
    mask = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    return torch.zeros_like(mask).scatter(-1, order, mask)
