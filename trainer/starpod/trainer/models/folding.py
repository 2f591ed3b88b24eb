"""Folding of rows with a common prefix: the model reads the prefix once, then each row's continuation.

All prompts share instructions, and members of a group share a prompt and sometimes the beginning of their replies. An
attention mask hides continuations from each other, so states equal those of the plain forward pass up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from starpod.trainer.models.attention import BLOCKS, SDPA
from starpod.trainer.models.trunk import hidden_states, layer_kinds, trunk_of, unwrapped

SHORTEST = 64
"""Minimum number of tokens of a folded prefix. For shorter ones, the mask costs more than reading the tokens again."""

_WORTH = 0.8
"""Rows are folded only if the work is at most this share of reading each row separately."""

_ATTENTION = 3
"""A multiplication in attention takes as long as three in a linear layer (135M parameters, two CPU cores)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Inputs of the model for B rows."""

    tokens_GL: Tensor
    """Token ids."""
    positions_GL: Tensor | None
    """Position of each token in its row; None counts from 0."""
    mask_G1LL: Tensor | None
    """True if a query sees a key; None is the causal mask."""
    places_BT: Tensor
    """Flat index in [G, L] of the state after token t of row b."""

    def read(self, trunk: nn.Module) -> Tensor:
        """Run the trunk and return flat hidden states, [G * L, hidden]."""
        return hidden_states(trunk, self.tokens_GL, self.positions_GL, self._masks(trunk)).flatten(0, 1)

    def _masks(self, trunk: Any) -> Any:
        """Return the mask of all layers, or one mask for each kind of layers if there are several."""
        full, positions_GL = self.mask_G1LL, self.positions_GL
        config = trunk.config.get_text_config()
        kinds = set(layer_kinds(config))
        if full is None or positions_GL is None or kinds == {"full_attention"}:
            return full
        sliding = full & (positions_GL[:, :, None] - positions_GL[:, None] < config.sliding_window)[:, None]
        return sliding if kinds == {"sliding_attention"} else {"full_attention": full, "sliding_attention": sliding}


@dataclass(frozen=True, slots=True)
class _Fold:
    """Rows that are read together, in lexicographic order."""

    rows: list[int]
    shared: list[int]
    """Number of first tokens that each row shares with the previous one. They are not read again."""
    total: int
    """Number of tokens that are read."""


def lay_out_plainly(tokens_BT: Tensor) -> Layout:
    """Lay out right-padded rows without folding."""
    places = torch.arange(tokens_BT.numel(), device=tokens_BT.device)
    return Layout(tokens_BT, None, None, places.view_as(tokens_BT))


def lay_out(tokens_BT: Tensor, lengths_B: Tensor, *, width: int, shortest: int = SHORTEST) -> Layout:
    """Fold right-padded rows with common prefixes if that is less work; otherwise lay them out separately.

    Args:
        width: Width of the hidden states, from which the work is estimated.
        shortest: Minimum number of tokens of a folded prefix.
    """
    padded_rows = tokens_BT.tolist()
    rows = [ids[:length] for ids, length in zip(padded_rows, lengths_B.tolist(), strict=True)]
    folds = _worthwhile_folds(rows, tokens_BT.shape[1], width, shortest)
    if not folds:
        return lay_out_plainly(tokens_BT)
    length = max(fold.total for fold in folds)
    tokens = [[0] * length for _ in folds]
    positions = [[0] * length for _ in folds]
    ends = [[length] * length for _ in folds]
    places = [[0] * tokens_BT.shape[1] for _ in rows]
    for index, fold in enumerate(folds):
        end = 0
        path: list[int] = []  # places of the previous row's tokens
        for row, prefix_length in zip(fold.rows, fold.shared, strict=True):
            for place in path[prefix_length:]:
                ends[index][place] = end
            start, end = end, end + len(rows[row]) - prefix_length
            tokens[index][start:end] = rows[row][prefix_length:]
            positions[index][start:end] = range(prefix_length, len(rows[row]))
            path = [*path[:prefix_length], *range(start, end)]
            places[row][: len(path)] = [index * length + place for place in path]
    device = tokens_BT.device
    return Layout(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        _mask(torch.tensor(ends, device=device)),
        torch.tensor(places, device=device),
    )


def tokens_read(rows: Sequence[list[int]], *, width: int) -> int:
    """Return the number of tokens, with padding, in the layout of these rows. It determines the memory of a pass."""
    max_length = max(map(len, rows))
    folds = _worthwhile_folds(rows, max_length, width, SHORTEST)
    return len(folds) * max(fold.total for fold in folds) if folds else len(rows) * max_length


def _worthwhile_folds(rows: Sequence[list[int]], longest: int, width: int, shortest: int) -> list[_Fold]:
    """Return the folds of the rows, or an empty list if folding saves too little work."""
    folds = _fold(rows, width, shortest)
    folded_work = len(folds) * _work(max(fold.total for fold in folds), width)
    plain_work = len(rows) * _work(longest, width)
    return [] if len(folds) == len(rows) or folded_work > _WORTH * plain_work else folds


def _work(tokens: int, width: int) -> int:
    """Estimate the time of one row in a layer of usual shape: linear layers plus attention."""
    return tokens * (6 * width + _ATTENTION * tokens)


def _fold(rows: Sequence[list[int]], width: int, shortest: int) -> list[_Fold]:
    """Group rows with common prefixes, as long as the added attention costs less than the saved tokens."""
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    prefix_lengths = [0, *(common_prefix(rows[row], rows[next_row]) for row, next_row in pairwise(order))]

    def parts(first: int, end: int) -> list[_Fold]:
        """Split a range of the ordered rows in two, recursively, as long as that is less work than reading it whole."""
        lengths = [0, *prefix_lengths[first + 1 : end]]
        new_counts = (len(rows[row]) - length for row, length in zip(order[first:end], lengths, strict=True))
        totals = [0, *accumulate(new_counts)]

        def apart(cut: int) -> int:
            before = totals[cut - first]
            return _work(before, width) + _work(totals[-1] - before + prefix_lengths[cut], width)

        min_length = min(lengths[1:], default=0)
        cuts = [index for index in range(first + 1, end) if prefix_lengths[index] < min_length + shortest]
        cut = min(cuts, key=apart, default=first)
        if cut == first or (min_length >= shortest and apart(cut) >= _work(totals[-1], width)):
            return [_Fold(order[first:end], lengths, totals[-1])]
        return [*parts(first, cut), *parts(cut, end)]

    return parts(0, len(order))


def _mask(ends_GL: Tensor) -> Tensor:
    """Return the mask [G, 1, L, L] in which a token sees only itself and earlier tokens of its row.

    Args:
        ends_GL: For each token, the end (exclusive) of the places whose rows contain this token.
    """
    places_L = torch.arange(ends_GL.shape[1], device=ends_GL.device)
    visible = places_L[None, :, None] < ends_GL[:, None, :]
    return visible.tril()[:, None]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    first, second = list(first), list(second)
    # Bisection compares slices, which is several times as fast for long prompts as comparing tokens one by one.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@torch.no_grad()
def folds_cleanly(model: nn.Module) -> bool:
    """Return whether the model computes the same states with folding.

    The model must use only full or sliding attention and accept masks.
    """
    config = unwrapped(model).config.get_text_config()
    kinds, attention = set(layer_kinds(config)), getattr(config, "_attn_implementation", None)
    if not kinds <= {"full_attention", "sliding_attention"} or attention not in (SDPA, BLOCKS):
        return False
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5]], device=next(model.parameters()).device)
    layouts = (lay_out_plainly(tokens), lay_out(tokens, torch.tensor([6, 6]), width=1_000_000, shortest=1))
    try:
        states = [layout.read(trunk_of(model))[layout.places_BT] for layout in layouts]
    except (TypeError, ValueError, RuntimeError):
        return False
    return layouts[1].mask_G1LL is not None and torch.allclose(states[0].float(), states[1].float(), 1e-2, 1e-2)
