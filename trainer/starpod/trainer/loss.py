"""The loss of one optimiser step: the policy's loss, the KL term, the entropy bonus and the critic's loss.

Every mean is taken over all rows of the step, before these are split into micro-batches and among ranks. Each token
carries its weight, and a loss is a weighted sum. The gradient therefore does not depend on the packing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.hae import stages
from starpod.trainer.algorithms.losses import (
    PolicyLoss,
    correction_weights,
    kl_coefficients,
    kl_divergence,
    proximal_logprobs,
    token_weights,
    value_loss,
)
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.sample import Block
from starpod.trainer.data.updates import ABOVE, BELOW, TRAINED
from starpod.trainer.parallel.ranks import Parallel

LOSS_TERMS = ("task", "entropy", "kl", "critic")
"""Components of the loss."""


class StepLoss:
    """The loss of one optimiser step, computed block by block.

    The losses of whole episodes and of branches are separate means, which are added up. Metrics are those of the whole
    episodes; of the branches if there are no others.

    Args:
        table: Table of the episodes, with advantages. It receives each token's ratio and marks.
        rows: Rows of this step.
        mask_BT: Mask of the tokens that belong to the policy's agent (bool).
        scale: Factor of the loss of whole episodes.
        branch_weight: Factor of the loss of branches.
        max_length: See `token_weights`.
        components: Components of the loss to include.
        finds: Whether the step itself finds the log-probabilities before the update. Ratios and corrections then refer
            to them, except in mode `bypass`.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        batch: Batch,
        table: RolloutBatch,
        rows: Sequence[int],
        *,
        mask_BT: Tensor,
        scale: float,
        branch_weight: float = 1.0,
        max_length: int = 1,
        components: Container[str] = LOSS_TERMS,
        finds: bool = False,
        device: torch.device,
    ) -> None:
        assert table.advantages is not None
        self.algorithm, self.table, self.mask_BT, self.components = algorithm, table, mask_BT, components
        main, branches = table.main_and_branches(rows)
        self.has_both = bool(main and branches)
        self.measured_BT = in_rows(main or branches, mask_BT)
        trained_BT = mask_BT & ~batch.truncated_BT() if algorithm.mask_truncated else mask_BT
        self.weights_BT = torch.zeros_like(table.old_logprobs_BT)
        for part, factor in ((main, scale), (branches, branch_weight)):
            weights_BT = token_weights(in_rows(part, trained_BT), algorithm.loss.average, max_length=max_length)
            self.weights_BT += factor * weights_BT
        value_mask_BT = in_rows(rows, table.advantages.value_mask_BT)
        self.value_weights_BT = scale * token_weights(value_mask_BT, "token-mean", max_length=1)
        self.kl = kl_coefficients(algorithm.kl, table)
        self.old_BT = self.default_BT = proximal_logprobs(algorithm.correction, table)
        """`default_BT` has the log-probabilities of tokens outside a block, for ratios of whole episodes."""
        self.found_BT = torch.zeros_like(self.weights_BT) if finds else None
        """Log-probabilities before the update, if the step finds them."""
        self.sums = Sums(device)

    def of_block(self, block: Block, scores: Any, counts: bool) -> Tensor:
        """Return the loss of a block, and add to the metrics.

        Args:
            scores: The policy's scores of the block, with entropies, and with values if there is a critic.
            counts: Whether the block counts on this rank.
        """
        rows, table, advantages = block.rows, self.table, self.table.advantages
        assert advantages is not None
        inside_RT = block.inside_RT & self.mask_BT[rows]
        logprobs_RT = block.in_rows(scores.logprobs_N.float(), fill=self.default_BT[rows])
        entropy_RT = block.in_rows(scores.entropy_N.float())
        old_RT, sampled_from_RT = self.old_BT[rows], table.old_logprobs_BT[rows]
        if self.found_BT is not None:
            sampled_from_RT = logprobs_RT.detach()
            self.found_BT[rows] += torch.where(inside_RT, sampled_from_RT, 0.0) * float(counts)
            old_RT = old_RT if self.algorithm.correction.mode == "bypass" else sampled_from_RT
        correction_RT = correction_weights(
            self.algorithm.correction, sampled_from_RT, table.sampler_logprobs_BT[rows], self.mask_BT[rows]
        )
        policy_loss = self.algorithm.policy_loss(
            logprobs_RT,
            old_RT,
            advantages.advantages_BT[rows],
            mask_BT=self.mask_BT[rows],
            turns_BT=table.turns_BT[rows],
        )
        if counts:
            trained_RT = self.weights_BT[rows] * correction_RT != 0
            marks_RT = TRAINED * trained_RT + BELOW * policy_loss.clipped_low_BT + ABOVE * policy_loss.clipped_high_BT
            table.mark(rows, inside_RT, policy_loss.ratio_BT.detach(), marks_RT)
        per_token_RT = policy_loss.per_token_BT * correction_RT * float("task" in self.components)
        if table.turn_weights_BT is not None:
            per_token_RT = per_token_RT * table.turn_weights_BT[rows]
        per_token_RT = self._add_terms(per_token_RT, rows, logprobs_RT, entropy_RT)
        losses_RT, measured_RT = self.weights_BT[rows] * per_token_RT, inside_RT & self.measured_BT[rows]
        self._measure(measured_RT, policy_loss, old_RT, logprobs_RT, entropy_RT, counts)
        loss = losses_RT[measured_RT].sum()
        self.sums.add("update/loss", loss, counts)
        if self.has_both:
            branch_loss = losses_RT[inside_RT & ~measured_RT].sum()
            self.sums.add("update/branch_loss", branch_loss, counts)
            loss = loss + branch_loss
        if "critic" in self.components and advantages.returns_BT is not None and table.values_BT is not None:
            loss = loss + self._critic_loss(block, scores.values_N, advantages.returns_BT, inside_RT, counts)
        return loss * float(counts)

    def _add_terms(self, per_token_RT: Tensor, rows: Sequence[int], logprobs_RT: Tensor, entropy_RT: Tensor) -> Tensor:
        """Return the policy's loss of each token with the KL term and the entropy bonus."""
        algorithm, ref_BT = self.algorithm, self.table.ref_logprobs_BT
        if "kl" in self.components and algorithm.kl.where == "loss" and ref_BT is not None:
            divergence_RT = kl_divergence(algorithm.kl.estimator, logprobs_RT, ref_BT[rows])
            coefficients = self.kl[rows] if isinstance(self.kl, Tensor) else self.kl
            per_token_RT = per_token_RT + coefficients * divergence_RT
        if "entropy" in self.components and algorithm.entropy_coefficient:
            per_token_RT = per_token_RT - algorithm.entropy_coefficient * entropy_RT
        return per_token_RT

    def _critic_loss(
        self, block: Block, values_N: Tensor, returns_BT: Tensor, inside_RT: Tensor, counts: bool
    ) -> Tensor:
        """Return the critic's loss of a block, times its coefficient."""
        critic, rows = self.algorithm.critic, block.rows
        assert critic is not None
        values_RT = values_in_rows(block, values_N, self.table, heads=self.algorithm.value_heads)
        error_RT = value_loss(values_RT, self.table.known_values_BT[rows], returns_BT[rows], critic.value_clip)
        loss = (self.value_weights_BT[rows] * error_RT)[inside_RT].sum()
        self.sums.add("critic/loss", loss, counts)
        return critic.value_coefficient * loss

    @torch.no_grad()
    def _measure(
        self,
        measured_RT: Tensor,
        policy_loss: PolicyLoss,
        old_RT: Tensor,
        logprobs_RT: Tensor,
        entropy_RT: Tensor,
        counts: bool,
    ) -> None:
        """Add the metrics of a block: means over all measured tokens of the step, and the largest ratio."""
        shares_RT = measured_RT / self.measured_BT.sum()
        for name, items_RT in {
            "entropy": entropy_RT,
            "kl": kl_divergence("k3", old_RT, logprobs_RT),
            "clip_fraction_low": policy_loss.clipped_low_BT,
            "clip_fraction_high": policy_loss.clipped_high_BT,
        }.items():
            self.sums.add(f"policy/{name}", (items_RT * shares_RT).sum(), counts)
        self.sums.add("policy/ratio_max", torch.where(measured_RT, policy_loss.ratio_BT, 0.0).max(), counts)


def in_rows(rows: Sequence[int], mask_BT: Tensor) -> Tensor:
    """Return the mask restricted to these rows."""
    rows_BT = torch.zeros_like(mask_BT)
    rows_BT[list(rows)] = mask_BT[list(rows)]
    return rows_BT


def values_in_rows(block: Block, values_N: Tensor, table: RolloutBatch, *, heads: int) -> Tensor:
    """Return a critic's values of a block as rows [R, T].

    Args:
        block: The block that was scored. Its R rows are selected.
        values_N: Value of each sampled token, in row-major order: [N], or [N, heads] with several heads.
        table: The batch, which gives the block of a reply that selects the head.
        heads: Number of values per context.
    """
    values_N = values_N.float()
    if heads == 1:
        return block.in_rows(values_N)
    values_RTH = torch.stack([block.in_rows(head_N) for head_N in values_N.unbind(1)], dim=2)
    return values_RTH.gather(2, stages(table.known_blocks_BT[block.rows]).unsqueeze(2)).squeeze(2)


class Sums:
    """Metrics of one optimiser step, summed over micro-batches and ranks. Metrics named `..._max` are maxima."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, counts: bool) -> None:
        value = value.detach() * float(counts)
        old = self.values.get(name)
        if old is None:
            self.values[name] = value
        else:
            self.values[name] = torch.maximum(old, value) if name.endswith("_max") else old + value

    def reduce(self, parallel: Parallel) -> dict[str, float]:
        """Return the metrics over all ranks."""
        values = dict(zip(self.values, torch.stack(list(self.values.values())).tolist(), strict=True))
        parts = parallel.gather_objects(values)
        return {name: (max if name.endswith("_max") else sum)(part[name] for part in parts) for name in values}
