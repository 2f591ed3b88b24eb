"""Rows that begin alike, read as one tree: what they share once, then what follows in each.

All prompts share instructions, members of a group a prompt, and some of them words of their replies. Attention hides
continuations from each other, so every state is that of the plain forward pass up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from starpod.trainer.models.trunk import hidden_states, plain, trunk_of

SHORTEST = 64
"""Shared beginnings of fewer tokens are read again: a mask costs more than they do."""

_WORTH = 0.8
"""Rows are folded where the work is at most this share of reading each by itself."""

_ATTENTION = 3
"""A multiplication in attention takes as long as three in a product: seen with 135M parameters on two CPU cores."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the model reads for B rows.

    tokens_GL: ids. positions_GL: of each in its row; None: counted from 0. mask_G1LL: True where a query sees a key;
    None: all that is to its left. places_BT: the flat place in [G, L] of the state after token t of row b.
    """

    tokens_GL: Tensor
    positions_GL: Tensor | None
    mask_G1LL: Tensor | None
    places_BT: Tensor

    def read(self, trunk: nn.Module) -> Tensor:
        """Hidden states, flat: [G * L, hidden]."""
        return hidden_states(trunk, self.tokens_GL, self.positions_GL, self.mask_G1LL).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Fold:
    """Rows that are read together, in lexicographic order. shared: tokens that each begins with like the one before it,
    which are not read again. total: tokens that are read."""

    rows: list[int]
    shared: list[int]
    total: int


def lay_out_plainly(tokens_BT: Tensor) -> Layout:
    """Each row by itself, right-padded."""
    places = torch.arange(tokens_BT.numel(), device=tokens_BT.device)
    return Layout(tokens_BT, None, None, places.view_as(tokens_BT))


def lay_out(tokens_BT: Tensor, lengths_B: Tensor, *, width: int, shortest: int = SHORTEST) -> Layout:
    """Rows with common beginnings folded into one, where that is less work; else each by itself.

    tokens_BT: right-padded; lengths_B: tokens of each row that are read. width: of the hidden states.
    """
    padded = tokens_BT.tolist()
    rows = [ids[:length] for ids, length in zip(padded, lengths_B.tolist(), strict=True)]
    folds = _worthwhile_folds(rows, tokens_BT.shape[1], width, shortest)
    if not folds:
        return lay_out_plainly(tokens_BT)
    length = max(fold.total for fold in folds)
    tokens = [[0] * length for _ in folds]
    positions = [[0] * length for _ in folds]
    ends = [[length] * length for _ in folds]
    places = [[0] * tokens_BT.shape[1] for _ in rows]
    for index, fold in enumerate(folds):
        read = 0
        path: list[int] = []  # places of the row before
        for row, shared in zip(fold.rows, fold.shared, strict=True):
            for place in path[shared:]:
                ends[index][place] = read
            first, read = read, read + len(rows[row]) - shared
            tokens[index][first:read] = rows[row][shared:]
            positions[index][first:read] = range(shared, len(rows[row]))
            path = [*path[:shared], *range(first, read)]
            places[row][: len(path)] = [index * length + place for place in path]
    device = tokens_BT.device
    return Layout(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        _mask(torch.tensor(ends, device=device)),
        torch.tensor(places, device=device),
    )


def tokens_read(rows: Sequence[list[int]], *, width: int) -> int:
    """Tokens of the layout of these rows, padding included: what a forward pass over them takes memory for."""
    longest = max(map(len, rows))
    folds = _worthwhile_folds(rows, longest, width, SHORTEST)
    return len(folds) * max(fold.total for fold in folds) if folds else len(rows) * longest


def _worthwhile_folds(rows: Sequence[list[int]], longest: int, width: int, shortest: int) -> list[_Fold]:
    """Rows that are read together; empty where that is not enough less work."""
    folds = _fold(rows, width, shortest)
    folded = len(folds) * _work(max(fold.total for fold in folds), width)
    apart = len(rows) * _work(longest, width)
    return [] if len(folds) == len(rows) or folded > _WORTH * apart else folds


def _work(tokens: int, width: int) -> int:
    """Time of one row in a layer of the usual shape: of its products, and of its attention."""
    return tokens * (6 * width + _ATTENTION * tokens)


def _fold(rows: Sequence[list[int]], width: int, shortest: int) -> list[_Fold]:
    """Rows that begin alike are read together, as far as attention over all of them takes less than it saves."""
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    shared = [0, *(common_prefix(rows[one], rows[next_]) for one, next_ in pairwise(order))]

    def parts(first: int, end: int) -> list[_Fold]:
        """Of these places in the order, cut in two as long as that is less work than reading them together."""
        again = [0, *shared[first + 1 : end]]
        fresh = (len(rows[row]) - before for row, before in zip(order[first:end], again, strict=True))
        read = [0, *accumulate(fresh)]

        def apart(cut: int) -> int:
            before = read[cut - first]
            return _work(before, width) + _work(read[-1] - before + shared[cut], width)

        least = min(again[1:], default=0)
        cuts = [place for place in range(first + 1, end) if shared[place] < least + shortest]
        cut = min(cuts, key=apart, default=first)
        if cut == first or (least >= shortest and apart(cut) >= _work(read[-1], width)):
            return [_Fold(order[first:end], again, read[-1])]
        return [*parts(first, cut), *parts(cut, end)]

    return parts(0, len(order))


def _mask(ends_GL: Tensor) -> Tensor:
    """[G, 1, L, L]: a token sees those that its rows begin with, up to itself.

    ends_GL: the place after the last token of the rows that go on from a token.
    """
    places_L = torch.arange(ends_GL.shape[1], device=ends_GL.device)
    seen = places_L[None, :, None] < ends_GL[:, None, :]
    return seen.tril()[:, None]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences."""
    first, second = list(first), list(second)
    # Halving compares slices: for long prompts several times as fast as one token after the other.
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
    """Whether the model reads folded rows as it reads plain ones: it has full attention alone, and takes a mask."""
    config = plain(model).config.get_text_config()
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return False
    if getattr(config, "_attn_implementation", None) != "sdpa" or getattr(config, "sliding_window", None):
        return False
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5]], device=next(model.parameters()).device)
    layouts = (lay_out_plainly(tokens), lay_out(tokens, torch.tensor([6, 6]), width=1_000_000, shortest=1))
    try:
        states = [layout.read(trunk_of(model))[layout.places_BT] for layout in layouts]
    except (TypeError, ValueError, RuntimeError):
        return False
    return layouts[1].mask_G1LL is not None and torch.allclose(states[0].float(), states[1].float(), 1e-2, 1e-2)
