"""Token samples for models: what a pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.images import Images, by_key

_Item = TypeVar("_Item")


class StructuredSpan(NamedTuple):
    """Tokens of a sample, from `begin` to before `end`, that are a reply with a structure (models/masks.py)."""

    begin: int
    end: int
    structure: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample."""

    tokens: list[int]
    """Token ids; ids below 0 refer to images."""
    sampled: list[bool]
    """Whether each token was sampled."""
    images: Images = field(default_factory=dict)
    """Images by key, at least those that the tokens refer to."""
    structures: list[StructuredSpan] = field(default_factory=list)
    """Replies that were sampled under a structure."""

    @classmethod
    def of(cls, prompt: Sequence[int], reply: Sequence[int], images: Images | None = None) -> Sample:
        """Return a sample of a prompt and the reply to it. Ids below 0 in the prompt refer to images."""
        return cls([*prompt, *reply], [False] * len(prompt) + [True] * len(reply), images or {})


@dataclass(frozen=True, slots=True)
class Block:
    """S samples that a model reads in one pass, right-padded to L tokens, and their place in the batch."""

    tokens_SL: Tensor
    """Token ids, int64; ids below 0 refer to images."""
    lengths_S: Tensor
    """Lengths without padding."""
    sampled_SL: Tensor
    """Whether each token was sampled (bool)."""
    images: Images
    """Images that the tokens refer to, by key."""
    structures: list[list[StructuredSpan]]
    """For each sample, the replies that were sampled under a structure."""
    rows: list[int]
    """The R rows of the batch that have a token in the block, ascending."""
    inside_RT: Tensor
    """Mask of these rows' tokens that are in the block (bool)."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Images, list[list[StructuredSpan]]]:
        """Arguments of `Policy.score`, which returns one result per True entry of `sampled_SL`, in row-major order."""
        return self.tokens_SL, self.lengths_S, self.sampled_SL, self.images, self.structures

    def in_rows(self, flat: Tensor, fill: Tensor | float = 0.0) -> Tensor:
        """Arrange a model's flat results in rows: [R, T].

        fill: value of tokens outside the block, a number or [R, T].
        """
        # Index with the mask instead of assigning to a copy, so that gradients flow.
        index = self.inside_RT.flatten().cumsum(0).view_as(self.inside_RT).sub(1).clamp(min=0)
        return torch.where(self.inside_RT, flat[index], torch.as_tensor(fill, dtype=flat.dtype, device=flat.device))


def samples_of(episode: Episode) -> list[Sample]:
    """Return the training samples of an episode in order. Turns shared with its parent are context.

    Raises ValueError if the first turn does not begin a sample.
    """
    samples: list[Sample] = []
    images = by_key(turn.image for turn in episode.turns)
    for index, turn in enumerate(episode.turns):
        if turn.fresh:
            samples.append(Sample([], [], images))
        elif not samples:
            raise ValueError("the first turn of an episode must begin a sample (Turn.fresh)")
        sample = samples[-1]
        sample.tokens.extend(turn.prompt)
        sample.sampled.extend([False] * len(turn.prompt))
        if turn.structure and turn.reply:
            begin = len(sample.tokens)
            sample.structures.append(StructuredSpan(begin, begin + len(turn.reply), turn.structure))
        sample.tokens.extend(turn.reply)
        sample.sampled.extend([index >= episode.shared] * len(turn.reply))
    return samples


def split(items: Sequence[_Item], parts: int) -> list[Sequence[_Item]]:
    """Split items into up to `parts` non-empty runs of nearly equal length, in order."""
    parts = min(parts, len(items))
    edges = [round(index * len(items) / parts) for index in range(parts + 1)] if parts else []
    return [items[first:last] for first, last in pairwise(edges)]
