"""Log-ratios between two policies."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this, in nats: beyond, a ratio is of no use and its exponential overflows."""


def clamped_difference(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """logprobs - other_logprobs, within [-20, 20]."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
