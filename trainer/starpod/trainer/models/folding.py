"""Rows that begin alike, read as one tree: what they share once, then what follows in each.

All prompts share instructions, members of a group a prompt, and some of them words of their replies. Attention hides
continuations from each other, so every state is that of the plain forward pass up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Fold:
    """Rows that are read together, in lexicographic order. shared: tokens that each begins with like the one before it,
    which are not read again. total: tokens that are read."""

    rows: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    total: int = 0

    def add(self, row: int, shared: int, length: int) -> None:
        self.rows.append(row)
        self.shared.append(shared)
        self.total += length - shared


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
    folds = [part for fold in _fold(rows, width, shortest) for part in _split(fold, rows, width)]
    folded = len(folds) * _work(max(fold.total for fold in folds), width)
    apart = len(rows) * _work(longest, width)
    return [] if len(folds) == len(rows) or folded > _WORTH * apart else folds


def _work(tokens: int, width: int) -> int:
    """Time of one row in a layer of the usual shape: of its products, and of its attention."""
    return tokens * (6 * width + _ATTENTION * tokens)


def _fold(rows: Sequence[list[int]], width: int, shortest: int) -> list[_Fold]:
    """Neighbours in lexicographic order are read together where that is less work than apart."""
    folds: list[_Fold] = []
    before: list[int] = []
    for row in sorted(range(len(rows)), key=lambda row: rows[row]):
        ids = rows[row]
        shared, before = common_prefix(before, ids), ids
        total = folds[-1].total if folds else 0
        together = _work(total + len(ids) - shared, width) < _work(total, width) + _work(len(ids), width)
        if not together or shared < shortest:
            shared = 0
            folds.append(_Fold())
        folds[-1].add(row, shared, len(ids))
    return folds


def _split(fold: _Fold, rows: Sequence[list[int]], width: int) -> list[_Fold]:
    """Parts of a fold of about equal length, where it is longer than is best; each reads for itself how it begins."""
    common = min(fold.shared[1:], default=fold.total)
    own = fold.total - common
    count = round(own / _room(common, width))
    if count <= 1:
        return [fold]
    parts: dict[int, _Fold] = {}
    before = -common
    for row, shared in zip(fold.rows, fold.shared, strict=True):
        part = min(max(0, before), own - 1) * count // own
        before += len(rows[row]) - shared
        if part not in parts:
            shared = 0
            parts[part] = _Fold()
        parts[part].add(row, shared, len(rows[row]))
    return list(parts.values())


def _room(common: int, width: int) -> int:
    """Tokens after the common ones at which each of them costs least.

    With fewer the common ones are read more often, with more each token looks at more others: the minimum over n of the
    work of common + n tokens, divided by n.
    """
    return math.isqrt(common * (common + 6 * width // _ATTENTION))


def _mask(ends_GL: Tensor) -> Tensor:
    """[G, 1, L, L]: a token sees those that its rows begin with, up to itself.

    ends_GL: the place after the last token of the rows that go on from a token.
    """
    places_L = torch.arange(ends_GL.shape[1], device=ends_GL.device)
    seen = places_L[None, :, None] < ends_GL[:, None, :]
    return seen.tril()[:, None]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])


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
