"""How the losses of tokens become one number, as weights: a loss is sum(weights * per-token losses).

The weights of one optimiser step are computed over its whole batch. So micro-batches and ranks, which add up gradients,
cannot change it however they share the tokens.
"""

from __future__ import annotations

from torch import Tensor


def token_weights(mask_BT: Tensor, average: str, *, max_length: int) -> Tensor:
    """Weights [B, T] as float32, 0 where the mask is False. Rows without a token count for nothing.

    average: `token-mean`, every token counts alike (DAPO); `seq-mean-token-mean`, every episode does (GRPO);
    `seq-mean-token-sum`, the mean over episodes of the sum over tokens; `seq-mean-token-sum-norm`, the same over the
    constant `max_length` (Dr. GRPO). Raises ValueError for another name.
    """
    weights_BT = mask_BT.float()
    length_B = weights_BT.sum(1, keepdim=True)
    rows = (length_B > 0).sum().clamp(min=1)
    if average == "token-mean":
        return weights_BT / weights_BT.sum().clamp(min=1)
    if average == "seq-mean-token-mean":
        return weights_BT / length_B.clamp(min=1) / rows
    if average == "seq-mean-token-sum":
        return weights_BT / rows
    if average == "seq-mean-token-sum-norm":
        return weights_BT / rows / max_length
    raise ValueError(f"no loss average {average!r}")
