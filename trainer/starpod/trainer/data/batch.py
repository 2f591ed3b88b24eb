"""Episodes as tensors: the token samples that a model reads, and the rows of sampled tokens that the algorithms read.

An episode is one sample while its context only grows, and several where a turn began afresh. Its row is the sampled
tokens of its samples, one after the other. A model reads samples, few or many of a row at a time; algorithms read rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from starpod.trainer.data.episode import Episode, Turn, lines_of, part_sums, payees_of
from starpod.trainer.data.images import Images, by_key
from starpod.trainer.prompts.grammar import BLOCKS

Item = TypeVar("Item")

_ALIKE = 64
"""Samples are of about one length within so many tokens. Shorter ones share too little to stand together."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample: ids, and where the sampled ones are. images: those that ids below 0 name, and others."""

    tokens: list[int]
    sampled: list[bool]
    images: Images = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Sequence[int], reply: Sequence[int], images: Images | None = None) -> Sample:
        """A prompt and the reply to it."""
        return cls([*prompt, *reply], [False] * len(prompt) + [True] * len(reply), images or {})


class Packed(NamedTuple):
    """Sequences right-padded to the longest, as `Policy.score` takes them: tokens_SL int64, lengths_S, sampled_SL bool.

    A flat result over the True entries of `sampled_SL`, in row-major order, is the rows' sampled tokens in order.
    images: those that ids below 0 name.
    """

    tokens_SL: Tensor
    lengths_S: Tensor
    sampled_SL: Tensor
    images: Images


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Rows of R episodes of which a block holds samples.

    rows: of the batch, ascending. inside_RT: bool, True at the sampled tokens that are in the block.
    """

    rows: list[int]
    inside_RT: Tensor

    def place(self, flat: Tensor, fill: Tensor | float = 0.0) -> Tensor:
        """A flat result over the block's sampled tokens as rows: [R, T].

        fill: of tokens outside the block: a number, or [R, T].
        """
        # Through the mask rather than into a copy, so that gradients flow.
        index = self.inside_RT.flatten().cumsum(0).view_as(self.inside_RT).sub(1).clamp(min=0)
        return torch.where(self.inside_RT, flat[index], torch.as_tensor(fill, dtype=flat.dtype, device=flat.device))


class _Place(NamedTuple):
    """A sample, and columns first to end (exclusive) of the row that it fills."""

    row: int
    sample: Sample
    first: int
    end: int


def samples_of(episode: Episode) -> list[Sample]:
    """The training samples of an episode, in order: what it shares with its parent is context there. Raises ValueError
    if the first turn does not begin one."""
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
        sample.tokens.extend(turn.reply)
        sample.sampled.extend([index >= episode.shared] * len(turn.reply))
    return samples


def split(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Up to `parts` runs of nearly equal length, in order, none empty."""
    parts = min(parts, len(items))
    edges = [round(index * len(items) / parts) for index in range(parts + 1)] if parts else []
    return [items[first:last] for first, last in pairwise(edges)]


class Batch:
    """Episodes with their rows' layout: [B episodes, T sampled tokens of the longest].

    Raises ValueError for an episode without a sampled token: there is nothing to train on.
    """

    def __init__(self, episodes: Sequence[Episode], device: torch.device | str = "cpu") -> None:
        self.episodes = list(episodes)
        self.payees = [payees_of(episode) for episode in self.episodes]
        self._lay_out([samples_of(episode) for episode in self.episodes], device)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
        """A row for each sample, to be scored: there are no episodes behind it, so no turns and no rewards."""
        batch = cls([], device)
        batch._lay_out([[sample] for sample in samples], device)
        return batch

    def _lay_out(self, samples: list[list[Sample]], device: torch.device | str) -> None:
        self.samples = samples
        self.device = torch.device(device)
        self.row_tokens = [sum(sum(sample.sampled) for sample in row) for row in samples]
        if not all(self.row_tokens):
            raise ValueError("an episode has no sampled token; leave it out of the batch")
        self._places: list[_Place] = []
        for row, own in enumerate(samples):
            first = 0
            for sample in own:
                end = first + sum(sample.sampled)
                if end > first:  # else there is nothing to score
                    self._places.append(_Place(row, sample, first, end))
                first = end
        steps = torch.arange(max(self.row_tokens, default=0))
        self.mask_BT = (steps < torch.tensor(self.row_tokens).unsqueeze(1)).to(self.device)

    def __len__(self) -> int:
        return len(self.samples)

    # --- rows --------------------------------------------------------------------------------------------------------

    def rows(self, values: Sequence[Sequence[float]], fill: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """One list per episode, right-padded with `fill`: [B, T]."""
        padded = torch.full(self.mask_BT.shape, fill, dtype=dtype)
        for row, own in zip(padded, values, strict=True):
            row[: len(own)] = torch.tensor(own, dtype=dtype)
        return padded.to(self.device)

    def per_turn(self, value: Sequence[Sequence[float]], fill: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """One value per turn of each episode, repeated on its sampled tokens: [B, T]."""
        return self.rows(
            [
                [v for turn, v in list(zip(episode.turns, own, strict=True))[episode.shared :] for _ in turn.reply]
                for episode, own in zip(self.episodes, value, strict=True)
            ],
            fill,
            dtype,
        )

    def turns_BT(self) -> Tensor:
        """Index of each token's turn; -1 where there is none."""
        return self.per_turn([range(len(episode.turns)) for episode in self.episodes], -1, torch.int64)

    def blocks_BT(self) -> Tensor:
        """Block of each token, as an index of BLOCKS; -1 in replies that could not be read, and where there is none.

        Raises ValueError for a turn that does not tell its blocks.
        """
        known = {name: index for index, name in enumerate(("", *BLOCKS), -1)}
        rows = []
        for episode in self.episodes:
            row: list[int] = []
            for turn in episode.own_turns:
                if turn.reply and not turn.spans:
                    raise ValueError(
                        f"a turn of group {episode.group} does not tell the blocks of its reply, which "
                        "algorithm.advantage compares: episodes of another run cannot be used here"
                    )
                before = 0
                for name, end in turn.spans:
                    row += [known[name]] * (end - before)
                    before = end
            rows.append(row)
        return self.rows(rows, -1, torch.int64)

    def switches_BT(self) -> Tensor:
        """bool, True on the tokens of turns that begin a subgoal: those that say so, and the first one of each line."""
        first = {id(line[0]) for episode in self.episodes for line in lines_of(episode.turns)}
        told = [[turn.switches or id(turn) in first for turn in episode.turns] for episode in self.episodes]
        return self.per_turn(told, False, torch.bool)

    def weights_BT(self) -> Tensor | None:
        """`Turn.weight` on the turn's tokens; None where all are 1."""
        told = [[turn.weight for turn in episode.turns] for episode in self.episodes]
        return self.per_turn(told, 1.0) if any(weight != 1 for own in told for weight in own) else None

    def truncated_BT(self) -> Tensor:
        """bool, True on the tokens of replies that a limit cut before their end token."""
        cut = [[turn.finish == "length" for turn in episode.turns] for episode in self.episodes]
        return self.per_turn(cut, False, torch.bool)

    def rewards_BT(self) -> Tensor:
        """The rewards that each turn is paid, at its last sampled token.

        float64: rounded, equal returns would seem to differ.
        """
        rows = []
        for episode, paid in zip(self.episodes, self._paid(), strict=True):
            row: list[float] = []
            for turn, turns in list(zip(episode.turns, paid, strict=True))[episode.shared :]:
                row += [0.0] * (len(turn.reply) - 1) + [sum(each.reward for each in turns)] * bool(turn.reply)
            rows.append(row)
        return self.rows(rows, dtype=torch.float64)

    def parts(self) -> list[list[Mapping[str, float]]]:
        """The parts of the rewards that each turn is paid."""
        return [[part_sums(turns) for turns in paid] for paid in self._paid()]

    def _paid(self) -> list[list[list[Turn]]]:
        """For each turn of each episode, the turns whose rewards it is paid (`payees_of`): mostly itself alone."""
        found = []
        for episode, payees in zip(self.episodes, self.payees, strict=True):
            paid: list[list[Turn]] = [[] for _ in episode.turns]
            for turn, payee in zip(episode.turns, payees, strict=True):
                paid[payee].append(turn)
            found.append(paid)
        return found

    def sampler_logprobs_BT(self) -> Tensor:
        """Log-probabilities as the engine reported them: [B, T]."""
        return self.rows([[p for turn in episode.own_turns for p in turn.logprobs] for episode in self.episodes])

    # --- what a model reads -------------------------------------------------------------------------------------------

    def pack(self, block: Sequence[int]) -> Packed:
        """The samples of a block of `micro_batches`, padded."""
        samples = [self._places[index].sample for index in block]
        width = max(len(sample.tokens) for sample in samples)
        tokens = torch.zeros(len(samples), width, dtype=torch.int64)
        sampled = torch.zeros(len(samples), width, dtype=torch.bool)
        for index, sample in enumerate(samples):
            tokens[index, : len(sample.tokens)] = torch.tensor(sample.tokens)
            sampled[index, : len(sample.tokens)] = torch.tensor(sample.sampled)
        lengths = torch.tensor([len(sample.tokens) for sample in samples])
        images = {key: image for sample in samples for key, image in sample.images.items()}
        return Packed(tokens.to(self.device), lengths.to(self.device), sampled.to(self.device), images)

    def unpack(self, block: Sequence[int]) -> Unpacked:
        """Where the results of `pack(block)` belong."""
        places = [self._places[index] for index in block]
        rows = sorted({place.row for place in places})
        inside = torch.zeros(len(rows), self.mask_BT.shape[1], dtype=torch.bool)
        line = {row: index for index, row in enumerate(rows)}
        for place in places:
            inside[line[place.row], place.first : place.end] = True
        return Unpacked(rows, inside.to(self.device))

    def micro_batches(
        self, rows: Sequence[int], max_tokens: int, tokens_read: Callable[[Sequence[list[int]]], int] | None = None
    ) -> list[list[int]]:
        """Splits the samples of these rows into blocks of at most `max_tokens` tokens: indices for `pack`.

        tokens_read: of the samples of a block, which is the policy's to say (`Policy.tokens_read`); None: padded ones.
        The longest come first, so that little is padding; among those of about one length, a group's stand together,
        so that what they share can be computed once. A sample that is longer than `max_tokens` has a block of its own.
        The samples of a row may lie in several blocks.
        """
        chosen = set(rows)

        def order(index: int) -> tuple[int, int, int, int]:
            row, width = self._places[index].row, len(self._places[index].sample.tokens)
            group = self.episodes[row].group if self.episodes else row
            return -(width if width < _ALIKE else width // _ALIKE * _ALIKE), group, -width, index

        ordered = sorted((index for index, place in enumerate(self._places) if place.row in chosen), key=order)
        samples = [self._places[index].sample.tokens for index in ordered]

        def fits(first: int, end: int) -> bool:
            block = samples[first:end]
            if len(block) * max(map(len, block)) <= max_tokens:
                return True
            return tokens_read is not None and tokens_read(block) <= max_tokens

        edges = [0]
        while edges[-1] < len(ordered):
            edges.append(_furthest(edges[-1] + 1, len(ordered), partial(fits, edges[-1])))
        # In the order of rows and turns, which is that of `Unpacked`.
        return [sorted(ordered[first:end]) for first, end in pairwise(edges)]


def _furthest(end: int, last: int, fits: Callable[[int], bool]) -> int:
    """The furthest end up to `last` that fits; `end` itself is taken to.

    In steps that double and then halve: `fits` takes milliseconds for a large block, too long to ask for every end.
    """
    step = 1
    while end + step <= last and fits(end + step):
        end, step = end + step, 2 * step
    while step := step // 2:
        if end + step <= last and fits(end + step):
            end += step
    return end


# --- rows that algorithms read ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """B episodes, right-padded to T sampled tokens. What lies between sampled tokens in a sequence is left out.

    mask_BT: bool, True where a token is. turns_BT: index of the token's turn in its episode, from 0; -1 elsewhere.
    rewards_BT: float64, non-zero only at the last sampled token of a turn.
    old_logprobs_BT: under the policy before the update; in an update of a single step, which gives them itself, the
        sampler's. sampler_logprobs_BT: as the engine reported them; the same where nothing is stale.
    ref_logprobs_BT: under the reference policy; None where no KL term is used.
    values_BT: the critic's value of the context before each token; None without a critic.
    bootstrap_B: value of the state after the last turn; 0 where the task itself ended or nothing is bootstrapped.
    groups_B: id of the episode's group.
    inherited: per episode, the sums of the named reward parts over the turns that it shares with its parent.
    trees: per episode, the member that its line of parents goes back to.
    turn_values: per episode and turn, as in `Turn.value`.
    state_keys: per episode and turn, the state's digest before the turn; b"" where unknown. agents, attempts,
        criteria: likewise, as in `Turn`.
    payees: per episode and turn, the turn on whose tokens its reward and credit are (`payees_of`). parts: of the
        rewards that each turn is paid, those of turns without tokens included.
    criteria_weights: per episode, factors of criteria by name; by default 1.
    blocks_BT: block of each token, an index of BLOCKS, -1 in replies that could not be read; None unless looked at.
    switches_BT: bool, True on the tokens of turns that begin a subgoal; likewise.
    weights_BT: of the policy's loss, where a search chose replies; None where all are 1.
    """

    mask_BT: Tensor
    turns_BT: Tensor
    rewards_BT: Tensor
    groups_B: Tensor
    old_logprobs_BT: Tensor
    sampler_logprobs_BT: Tensor
    bootstrap_B: Tensor
    values_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    inherited: Sequence[Mapping[str, float]] = ()
    trees: Sequence[int] = ()
    turn_values: Sequence[Sequence[float | None]] = ()
    state_keys: Sequence[Sequence[bytes]] = ()
    agents: Sequence[Sequence[str]] = ()
    attempts: Sequence[Sequence[int]] = ()
    payees: Sequence[Sequence[int]] = ()
    parts: Sequence[Sequence[Mapping[str, float]]] = ()
    criteria: Sequence[Sequence[Mapping[str, bool]]] = ()
    criteria_weights: Sequence[Mapping[str, float]] = ()
    blocks_BT: Tensor | None = None
    switches_BT: Tensor | None = None
    weights_BT: Tensor | None = None

    def rows(self, rows: Sequence[int]) -> RolloutBatch:
        """These episodes alone, padded as before."""
        chosen: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value[list(rows)]
            elif value is not None and len(value):
                value = [value[row] for row in rows]
            chosen[item.name] = value
        return RolloutBatch(**chosen)

    @property
    def returns_B(self) -> Tensor:
        """Undiscounted return of each episode."""
        return torch.where(self.mask_BT, self.rewards_BT, 0.0).sum(1) + self.inherited_B()

    @property
    def known_values_BT(self) -> Tensor:
        """values_BT. Raises ValueError without a critic."""
        if self.values_BT is None:
            raise ValueError("this estimator needs the critic's values, and the rollout has none")
        return self.values_BT

    def inherited_B(self, parts: Sequence[str] = (), without: Sequence[str] = ()) -> Tensor:
        """Rewards of shared turns. parts: of these alone; empty: of all but those `without`."""
        sums = [
            sum(paid for name, paid in own.items() if name not in without and (name in parts or not parts))
            for own in self.inherited
        ]
        return torch.tensor(sums or [0.0] * len(self.mask_BT), dtype=torch.float64, device=self.mask_BT.device)


@dataclass(frozen=True, slots=True)
class Advantages:
    """advantages_BT: of each sampled token, 0 elsewhere. returns_BT: what the critic should have said; None without
    one. value_mask_BT: bool, the tokens that the critic learns from: all sampled ones, with a trajectory baseline
    each episode's first, with hae those at which a value is read."""

    advantages_BT: Tensor
    returns_BT: Tensor | None
    value_mask_BT: Tensor

    @classmethod
    def over_values(cls, advantages_BT: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Advantages:
        """Return the advantages of a critic that should have said advantages + values at every sampled token."""
        return cls(advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0.0), mask_BT)
