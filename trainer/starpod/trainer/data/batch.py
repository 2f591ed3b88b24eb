"""Episodes as tensors: token samples for models, and rows of sampled tokens for algorithms.

An episode whose context only grows is one sample. Each turn with a new context (`Turn.fresh`) begins another sample. An
episode's row consists of the sampled tokens of all its samples in order. Models read samples, and algorithms read rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from starpod.trainer.data.episode import Episode, paid_turns, part_sums
from starpod.trainer.data.sample import Block, Sample, samples_of
from starpod.trainer.prompts.grammar import BLOCKS

_ALIKE = 64
"""Samples are sorted by length, rounded down to a multiple of this number of tokens, and then by group. Shorter samples
are sorted by exact length, because their common prefixes are too short to matter."""


class Batch:
    """A batch of B episodes, with the layout of their sampled tokens in tensors [B, T].

    T is the largest number of sampled tokens of an episode.

    Raises ValueError for an episode without a sampled token, because there is nothing to train on.
    """

    def __init__(self, episodes: Sequence[Episode], device: torch.device | str = "cpu") -> None:
        self.episodes = list(episodes)
        self._lay_out([samples_of(episode) for episode in self.episodes], device)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
        """Return a batch with a row per sample, for scoring. It has no episodes, turns or rewards."""
        batch = cls([], device)
        batch._lay_out([[sample] for sample in samples], device)
        return batch

    def _lay_out(self, samples: list[list[Sample]], device: torch.device | str) -> None:
        self.samples = samples
        self.device = torch.device(device)
        self.row_tokens = [sum(sum(sample.sampled) for sample in row) for row in samples]
        if not all(self.row_tokens):
            raise ValueError("an episode has no sampled token; leave it out of the batch")
        self._scored: list[tuple[int, slice, Sample]] = []  # row, columns and sample, if it has a sampled token
        for row, row_samples in enumerate(samples):
            first = 0
            for sample in row_samples:
                end = first + sum(sample.sampled)
                if end > first:
                    self._scored.append((row, slice(first, end), sample))
                first = end
        positions = torch.arange(max(self.row_tokens, default=0))
        self.mask_BT = (positions < torch.tensor(self.row_tokens).unsqueeze(1)).to(self.device)

    def __len__(self) -> int:
        return len(self.samples)

    # --- rows --------------------------------------------------------------------------------------------------------

    def rows(self, values: Sequence[Sequence[float]], fill: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return lists of values per token as a table.

        Args:
            values: For each episode a list with one value per sampled token.
            fill: Value of the padding on the right.

        Returns:
            The table [B, T], on the batch's device.
        """
        table = torch.full(self.mask_BT.shape, fill, dtype=dtype)
        for row, items in zip(table, values, strict=True):
            row[: len(items)] = torch.tensor(items, dtype=dtype)
        return table.to(self.device)

    def per_turn(self, value: Sequence[Sequence[float]], fill: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Repeat values of turns on the turns' sampled tokens.

        Args:
            value: For each episode a list with one value per turn, turns that are shared with a parent included.
            fill: Value of the padding on the right.

        Returns:
            The table [B, T], without tokens of shared turns.
        """
        return self.rows(
            [
                [v for turn, v in list(zip(episode.turns, items, strict=True))[episode.shared :] for _ in turn.reply]
                for episode, items in zip(self.episodes, value, strict=True)
            ],
            fill,
            dtype,
        )

    def turns_BT(self) -> Tensor:
        """Return the turn of each token; -1 for padding."""
        return self.per_turn([range(len(episode.turns)) for episode in self.episodes], -1, torch.int64)

    def blocks_BT(self) -> Tensor:
        """Return the block of each token as an index of BLOCKS; -1 in ill-formed replies and for padding.

        Raises ValueError for a turn whose blocks were not recorded.
        """
        indices = {name: index for index, name in enumerate(("", *BLOCKS), -1)}
        rows = []
        for episode in self.episodes:
            row: list[int] = []
            for turn in episode.own_turns:
                if turn.reply and not turn.spans:
                    raise ValueError(
                        f"a turn of group {episode.group} lacks the blocks of its reply, which algorithm.advantage "
                        "compares: episodes of another run cannot be used here"
                    )
                start = 0
                for name, end in turn.spans:
                    row += [indices[name]] * (end - start)
                    start = end
            rows.append(row)
        return self.rows(rows, -1, torch.int64)

    def turn_weights_BT(self) -> Tensor | None:
        """Return `Turn.weight` on the turn's tokens; None if all are 1."""
        weights = [[turn.weight for turn in episode.turns] for episode in self.episodes]
        return self.per_turn(weights, 1.0) if any(weight != 1 for row in weights for weight in row) else None

    def truncated_BT(self) -> Tensor:
        """Return a mask of the tokens of replies that were cut off before their end token."""
        cut = [[turn.finish == "length" for turn in episode.turns] for episode in self.episodes]
        return self.per_turn(cut, False, torch.bool)

    def rewards_BT(self) -> Tensor:
        """Return the rewards that each turn receives, at its last sampled token.

        They are float64, because rounding would make equal returns differ.
        """
        rows = []
        for episode in self.episodes:
            row: list[float] = []
            for turn, sources in list(zip(episode.turns, paid_turns(episode), strict=True))[episode.shared :]:
                row += [0.0] * (len(turn.reply) - 1) + [sum(source.reward for source in sources)] * bool(turn.reply)
            rows.append(row)
        return self.rows(rows, dtype=torch.float64)

    def sampler_logprobs_BT(self) -> Tensor:
        """Return the log-probabilities that the engine reported: [B, T]."""
        return self.rows([[p for turn in episode.own_turns for p in turn.logprobs] for episode in self.episodes])

    # --- samples for models -------------------------------------------------------------------------------------------

    def block(self, indices: Sequence[int]) -> Block:
        """Return the samples that `micro_batches` put together, padded."""
        places = [self._scored[index] for index in indices]
        samples = [sample for _, _, sample in places]
        width = max(len(sample.tokens) for sample in samples)
        tokens = torch.zeros(len(samples), width, dtype=torch.int64)
        sampled = torch.zeros(len(samples), width, dtype=torch.bool)
        for index, sample in enumerate(samples):
            tokens[index, : len(sample.tokens)] = torch.tensor(sample.tokens)
            sampled[index, : len(sample.tokens)] = torch.tensor(sample.sampled)
        lengths = torch.tensor([len(sample.tokens) for sample in samples])
        images = {key: image for sample in samples for key, image in sample.images.items()}
        structures = [sample.structures for sample in samples]
        rows = sorted({row for row, _, _ in places})
        inside_RT = torch.zeros(len(rows), self.mask_BT.shape[1], dtype=torch.bool)
        row_index = {row: index for index, row in enumerate(rows)}
        for row, columns, _ in places:
            inside_RT[row_index[row], columns] = True
        device = self.device
        return Block(
            tokens.to(device), lengths.to(device), sampled.to(device), images, structures, rows, inside_RT.to(device)
        )

    def samples_in(self, mask_BT: Tensor) -> list[int]:
        """Return the number of samples of each row that have a token in this mask."""
        counts = [0] * len(self)
        for index in self._with_token_in(mask_BT):
            counts[self._scored[index][0]] += 1
        return counts

    def _with_token_in(self, mask_BT: Tensor) -> Sequence[int]:
        """Return the indices of the scored samples that have a token in this mask."""
        if mask_BT is self.mask_BT:  # all have one, which need not be looked up again at each optimiser step
            return range(len(self._scored))
        inside_BT = mask_BT.cpu()
        return [index for index, (row, columns, _) in enumerate(self._scored) if inside_BT[row, columns].any()]

    def micro_batches(
        self,
        rows: Sequence[int],
        max_tokens: int,
        tokens_read: Callable[[Sequence[list[int]]], int] | None = None,
        mask_BT: Tensor | None = None,
    ) -> list[list[int]]:
        """Split the samples of these rows into blocks of at most `max_tokens` tokens, as arguments of `block`.

        The longest samples come first, to minimise padding. Among samples of about equal length, those of a group are
        adjacent, so that their common prefix can be computed once. A sample longer than `max_tokens` is a separate
        block. Samples of a row may be in different blocks.

        Args:
            tokens_read: Returns the number of tokens that the policy reads for a block (`Policy.tokens_read`). By
                default, a block's size is its number of samples times the longest one.
            mask_BT: Leave out samples without a token in this mask (bool). By default, none is left out.
        """
        row_set = set(rows)

        def order(index: int) -> tuple[int, int, int, int]:
            row, _, sample = self._scored[index]
            width = len(sample.tokens)
            group = self.episodes[row].group if self.episodes else row
            return -(width if width < _ALIKE else width // _ALIKE * _ALIKE), group, -width, index

        with_token = self._with_token_in(self.mask_BT if mask_BT is None else mask_BT)
        indices = sorted((index for index in with_token if self._scored[index][0] in row_set), key=order)
        samples = [self._scored[index][2].tokens for index in indices]

        def fits(first: int, end: int) -> bool:
            block = samples[first:end]
            if len(block) * max(map(len, block)) <= max_tokens:
                return True
            return tokens_read is not None and tokens_read(block) <= max_tokens

        edges = [0]
        while edges[-1] < len(indices):
            edges.append(_furthest(edges[-1] + 1, len(indices), partial(fits, edges[-1])))
        # Sort by row and turn, in which `Block.in_rows` reads the results.
        return [sorted(indices[first:end]) for first, end in pairwise(edges)]


def _furthest(end: int, last: int, fits: Callable[[int], bool]) -> int:
    """Return the furthest end up to `last` that fits. The first `end` is assumed to fit.

    Step sizes double and then halve, because `fits` takes milliseconds for a large block, which is too slow for every
    end.
    """
    step = 1
    while end + step <= last and fits(end + step):
        end, step = end + step, 2 * step
    while step := step // 2:
        if end + step <= last and fits(end + step):
            end += step
    return end


# --- rows for algorithms ----------------------------------------------------------------------------------------------


class Advantages(NamedTuple):
    """Result of an estimator."""

    advantages_BT: Tensor
    """Advantage of each sampled token, 0 elsewhere."""
    returns_BT: Tensor | None
    """Targets of the critic; None without one."""
    value_mask_BT: Tensor
    """Mask of the tokens that the critic learns from (bool): all sampled ones; with a trajectory baseline, each
    episode's first; with `hae`, those at which a value is read."""

    @classmethod
    def over_values(cls, advantages_BT: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Advantages:
        """Return advantages of an estimator with a critic, which learns at every sampled token.

        Args:
            values_BT: The critic's values; its targets are advantage + value.
            mask_BT: Mask of the tokens (bool); targets are 0 elsewhere.
        """
        return cls(advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0.0), mask_BT)


@dataclass(slots=True)
class RolloutBatch:
    """The table of sampled tokens that an update learns from: B episodes, right-padded to T tokens.

    Tokens of prompts have no position. The columns are filled in the order of an update: what was sampled, the scores
    of the policies, advantages, and what the loss did with each token.
    """

    mask_BT: Tensor
    """Mask of the tokens (bool); False for padding."""
    turns_BT: Tensor
    """Turn of each token in its episode, from 0; -1 for padding."""
    rewards_BT: Tensor
    """Rewards in float64. They are only non-zero at the last sampled token of a turn."""
    groups_B: Tensor
    """Id of the episode's group."""
    old_logprobs_BT: Tensor
    """Log-probabilities under the policy before the update. An update with a single step computes them in that step,
    so that this field then has the sampler's."""
    sampler_logprobs_BT: Tensor
    """Log-probabilities as the engine reported them."""
    bootstrap_B: Tensor
    """Value of the state after the last turn; 0 if the task itself ended or nothing is bootstrapped."""
    values_BT: Tensor | None = None
    """The critic's value of the context before each token; None without a critic."""
    ref_logprobs_BT: Tensor | None = None
    """Log-probabilities under the reference policy; None without a KL term."""
    teacher_logprobs_BT: Tensor | None = None
    """Log-probabilities under the teacher; None without one."""
    episodes: Sequence[Episode] = ()
    """The episodes, for estimators that need more than the tensors."""
    criteria_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Weight of each criterion, by task and then by criterion; 1 by default. Task "" applies to all other tasks."""
    blocks_BT: Tensor | None = None
    """Block of each token as an index of BLOCKS, -1 in ill-formed replies; None if the estimator ignores blocks."""
    turn_weights_BT: Tensor | None = None
    """`Turn.weight` of each token; None if all are 1."""
    is_branch_B: Tensor | None = None
    """Whether an episode is only compared with its siblings (`Group.branches`); None if none is."""
    advantages: Advantages | None = None
    """Advantages, once they are computed."""
    ratios_BT: Tensor | None = None
    """Ratio of each token before clipping, from the last pass over it; 0 before."""
    marks_BT: Tensor | None = None
    """Sum of the marks TRAINED, BELOW and ABOVE (data/updates.py) of each token, from the last pass over it."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        criteria_weights: Mapping[str, Mapping[str, float]] | None = None,
        *,
        blocks: bool = False,
        branches: int = 0,
    ) -> RolloutBatch:
        """Return a batch with only the engine's log-probabilities.

        Args:
            blocks: Whether the estimator needs `blocks_BT`.
            branches: Number of episodes at the end of the batch that are branches.
        """
        sampler_BT = batch.sampler_logprobs_BT()
        return cls(
            mask_BT=batch.mask_BT,
            turns_BT=batch.turns_BT(),
            rewards_BT=batch.rewards_BT(),
            groups_B=torch.tensor([episode.group for episode in batch.episodes], device=batch.device),
            old_logprobs_BT=sampler_BT,
            sampler_logprobs_BT=sampler_BT,
            bootstrap_B=torch.zeros(len(batch), device=batch.device),
            episodes=batch.episodes,
            criteria_weights=criteria_weights or {},
            blocks_BT=batch.blocks_BT() if blocks else None,
            turn_weights_BT=batch.turn_weights_BT(),
            is_branch_B=torch.arange(len(batch), device=batch.device) >= len(batch) - branches if branches else None,
            ratios_BT=torch.zeros_like(sampler_BT),
            marks_BT=torch.zeros_like(sampler_BT),
        )

    def rows(self, rows: Sequence[int]) -> RolloutBatch:
        """Return a batch of these rows only, with the same padding."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        tensors = {name: value[list(rows)] for name, value in values.items() if isinstance(value, Tensor)}
        return RolloutBatch(**{**values, **tensors, "episodes": [self.episodes[row] for row in rows]})

    def main_and_branches(self, rows: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return which of these rows are whole episodes, and which are branches, in order."""
        flags = [False] * len(self.mask_BT) if self.is_branch_B is None else self.is_branch_B.tolist()
        rows = list(rows)
        return [row for row in rows if not flags[row]], [row for row in rows if flags[row]]

    def clear_marks(self, rows: Sequence[int], mask_BT: Tensor) -> None:
        """Forget the last pass over these rows' tokens in the mask. Ranks add up their marks, so old ones must go."""
        for column_BT in (self.ratios_BT, self.marks_BT):
            if column_BT is not None:
                column_BT[list(rows)] = column_BT[list(rows)].masked_fill(mask_BT[list(rows)], 0.0)

    def mark(self, rows: Sequence[int], inside_RT: Tensor, ratios_RT: Tensor, marks_RT: Tensor) -> None:
        """Record what the loss did with the tokens of a block: their mask (bool), detached ratios, and marks."""
        for column_BT, items_RT in ((self.ratios_BT, ratios_RT), (self.marks_BT, marks_RT)):
            if column_BT is not None:
                column_BT[list(rows)] += items_RT * inside_RT

    @property
    def known_values_BT(self) -> Tensor:
        """The critic's values, `values_BT`. Raises ValueError if there is no critic."""
        if self.values_BT is None:
            raise ValueError("this estimator needs the critic's values, but the rollout has none")
        return self.values_BT

    @property
    def known_blocks_BT(self) -> Tensor:
        """The block of each token, `blocks_BT`. Raises ValueError if blocks are not known."""
        if self.blocks_BT is None:
            raise ValueError("this estimator needs the blocks of replies, but the rollout has none")
        return self.blocks_BT

    def inherited_B(self, parts: Sequence[str] = (), without: Sequence[str] = ()) -> Tensor:
        """Return for each episode the sum of rewards in the turns that it shares with its parent.

        Args:
            parts: Reward parts that count; empty: all.
            without: Reward parts that do not count.
        """
        shared_parts = [part_sums(episode.turns[: episode.shared]) for episode in self.episodes]
        sums = [
            sum(reward for name, reward in rewards.items() if name not in without and (name in parts or not parts))
            for rewards in shared_parts
        ]
        return torch.tensor(sums or [0.0] * len(self.mask_BT), dtype=torch.float64, device=self.mask_BT.device)

    def ancestors_B(self, items_BT: Tensor) -> Tensor:
        """Return for each episode the sum of items over the tokens of turns that it shares with its parent.

        These tokens are in the rows of its ancestors. An ancestor that is not in the batch counts as 0.
        """
        sums_B = items_BT.new_zeros(len(self.mask_BT))
        rows = {(episode.group, episode.member): row for row, episode in enumerate(self.episodes)}
        for row, episode in enumerate(self.episodes):
            ancestor, shared = episode, episode.shared
            while ancestor.parent is not None and (episode.group, ancestor.parent[0]) in rows:
                shared = min(shared, ancestor.shared)
                parent_row = rows[episode.group, ancestor.parent[0]]
                ancestor = self.episodes[parent_row]
                shared_T = self.mask_BT[parent_row] & (self.turns_BT[parent_row] < shared)
                sums_B[row] += items_BT[parent_row][shared_T].sum()
        return sums_B
