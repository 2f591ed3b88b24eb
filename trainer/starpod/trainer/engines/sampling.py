"""Drawing tokens from logits, each row from its own random stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_BLOCK = 32
"""Uniforms that are drawn at a time."""


class Uniforms:
    """The random numbers of one reply, in [0, 1), one per token: the same for the same seed, however many are drawn."""

    __slots__ = ("_drawn", "_generator", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: np.random.Generator | None = None
        self._drawn: list[float] = []

    def __getitem__(self, index: int) -> float:
        if self._generator is None:
            # Counter-based, so that neighbouring seeds give unrelated streams.
            self._generator = np.random.Generator(np.random.Philox(key=self._seed % 2**128))
        while index >= len(self._drawn):
            self._drawn.extend(self._generator.random(_BLOCK).tolist())
        return self._drawn[index]


def draw(
    logits_NV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """One token for each row, and its log-probability in nats. logits_NV: float32.

    temperatures: divide the logits; at 0 the likeliest token is taken, with probability 1. top_ps: below 1 the smallest
    set of likeliest tokens that holds at least this share is sampled from, and log-probabilities are those within it.
    uniforms: in [0, 1): where the inverse of the cumulative distribution is read. Raises FloatingPointError where a row
    is no distribution.

    A row's result does not depend on the other rows.
    """
    device = logits_NV.device
    if any(temperature != 1.0 for temperature in temperatures):
        divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
        logits_NV = logits_NV / divisors[:, None]
    log_p = torch.log_softmax(logits_NV, -1)
    p = torch.softmax(logits_NV, -1)
    if any(top_p < 1.0 for top_p in top_ps):
        kept = _nucleus(p, torch.tensor(top_ps, device=device, dtype=torch.float64))
        p = torch.where(kept, p, 0.0)
        # Rows with the whole distribution have nothing cut off, and keep their bits.
        share = torch.where(kept.all(-1), 1.0, p.sum(-1))
        log_p = torch.where(kept, log_p - share.log()[:, None], -torch.inf)
    cumulative = p.cumsum(-1, dtype=torch.float64)
    target = torch.tensor(uniforms, device=device, dtype=torch.float64) * cumulative[:, -1]
    # The first token whose cumulative probability is above the target: one of probability 0 never is.
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    likeliest = p.argmax(-1)
    # Rounding can put the target at the very end.
    tokens = torch.where(tokens < p.shape[-1], tokens, likeliest)
    logprobs = log_p.gather(-1, tokens[:, None])[:, 0]
    if any(temperature == 0.0 for temperature in temperatures):
        greedy = torch.tensor([temperature == 0.0 for temperature in temperatures], device=device)
        tokens = torch.where(greedy, likeliest, tokens)
        logprobs = torch.where(greedy, 0.0, logprobs)
    if not torch.isfinite(cumulative[:, -1]).all():
        raise FloatingPointError("the policy's logits are not finite: its weights have diverged")
    return tokens, logprobs


def _nucleus(p: Tensor, top_p: Tensor) -> Tensor:
    """Marks the tokens in the smallest set of likeliest ones with at least `top_p` of the probability."""
    ordered, order = p.sort(stable=True, dim=-1, descending=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    return torch.zeros_like(inside).scatter(-1, order, inside)
