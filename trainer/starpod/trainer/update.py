"""Scoring and optimiser steps of one policy on a table of tokens. loss.py has the loss of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.advantages import advantages_by_kind
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.distillation import Judge
from starpod.trainer.checkpoints.state import flatten_optimizer, unflatten_optimizer
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch
from starpod.trainer.data.images import Images, by_key
from starpod.trainer.data.sample import Block, Sample
from starpod.trainer.loss import LOSS_TERMS, StepLoss, in_rows, values_in_rows
from starpod.trainer.models.first_adapters import FirstAdapters
from starpod.trainer.models.policy import CriticKind, Policy
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.config import PivotsConfig

CRITIC_LR: dict[CriticKind, float] = {"shared": 1e-3, "separate": 1e-5}
"""Default learning rates of critics. A head alone starts at zero and would not learn at the rate of a whole model."""


class LogprobGap(Exception):
    """The log-probabilities of sampler and trainer differ, so updates from these samples would be wrong."""


class PolicyTrainer:
    """Scoring and optimiser steps of one policy. It owns the optimiser.

    `reference` is None until `freeze_reference`.

    Args:
        temperature: Temperature of sampling, so that the trained distribution is the sampled one.
        max_length: Longest context in tokens. The loss average `seq-mean-token-sum-norm` divides by it.
        make_reference: Builds the frozen policy of the KL term, with any weights. Only used without adapters.
        branches: How advantages of branches are scaled and their loss weighted.
        criteria_weights: See `Config.criteria_weights`.
        teacher: Judges the policy's tokens in stages with `algorithm.distillation`.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        parallel: Parallel,
        *,
        temperature: float = 1.0,
        max_length: int = 1,
        make_reference: Callable[[], Policy] | None = None,
        seed: int = 0,
        branches: PivotsConfig | None = None,
        criteria_weights: Mapping[str, Mapping[str, float]] | None = None,
        teacher: Judge | None = None,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.config = optimizer
        self.parallel = parallel
        self.temperature = temperature
        self.max_length = max_length
        self.branches = branches or PivotsConfig()
        self.criteria_weights = criteria_weights or {}
        self.teacher = teacher
        self.reference: Policy | FirstAdapters | None = None
        self._make_reference = make_reference
        self.generator = torch.Generator().manual_seed(seed)
        parameter_lists = [list(policy.trained_parameters()), list(policy.critic_parameters())]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": parameters, "lr": rate, "rate": rate}
                for parameters, rate in zip(parameter_lists, self._rates(optimizer), strict=True)
                if parameters
            ],
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def _rates(self, optimizer: OptimizerConfig) -> tuple[float, float]:
        """Return the learning rates of policy and critic."""
        return optimizer.lr, optimizer.critic_lr or CRITIC_LR.get(self.policy.critic_kind, optimizer.lr)

    def configure(
        self,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        criteria_weights: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Use another algorithm, other rates and other weights from now on. The optimiser keeps its state.

        Args:
            algorithm: Advantages, losses and filter.
            optimizer: Learning rates, clipping and micro-batches. Betas, eps and weight decay keep their first values.
            criteria_weights: Weights of criteria by task name ("" in a run with one environment), then by criterion.
        """
        self.algorithm, self.config, self.criteria_weights = algorithm, optimizer, criteria_weights
        for parameters, rate in zip(self.optimizer.param_groups, self._rates(optimizer), strict=False):
            parameters["rate"] = rate

    # --- the table of tokens ------------------------------------------------------------------------------------------

    def tabulate(self, batch: Batch, *, branches: int = 0) -> RolloutBatch:
        """Return the table of a batch with only the engine's log-probabilities.

        branches: number of episodes at the end of the batch that are branches.
        """
        blocks = bool(self.algorithm.blocks)
        return RolloutBatch.of(batch, self.criteria_weights, blocks=blocks, branches=branches)

    def estimate(self, table: RolloutBatch) -> Advantages:
        """Return the advantages of scored episodes. Raises ValueError; see `advantages_by_kind`."""
        advantages = advantages_by_kind(self.algorithm, table, self.branches.scale)
        return self.algorithm.distillation.add_to(advantages, table)

    def check_sampler(
        self, batch: Batch, table: RolloutBatch, logprobs_BT: Tensor, version: int, mask_BT: Tensor
    ) -> dict[str, float]:
        """Compare the engine's log-probabilities of this version's tokens with the policy's, and return metrics.

        Args:
            version: Version of this policy. Tokens of other versions are not compared.
            mask_BT: Mask of the tokens to compare (bool).

        Raises:
            LogprobGap: They differ too much.
        """
        versions = [[v for turn in episode.own_turns for v in turn.versions] for episode in batch.episodes]
        fresh_BT = batch.rows(versions, -1, torch.int64).eq(version) & mask_BT
        gaps = (logprobs_BT - table.sampler_logprobs_BT).abs()[fresh_BT]
        return check_logprob_gaps(self.config, gaps) if gaps.numel() else {}

    def freeze_reference(self, state: Mapping[str, Tensor] | None) -> None:
        """Set the KL term's reference policy from `reference_state`, or to the current policy if `state` is None."""
        if self.policy.frozen():
            adapters = self.reference = FirstAdapters(self.policy)
            if state is not None:
                adapters.load_state_dict(state)
            return
        assert self._make_reference is not None
        reference = self._make_reference()
        reference.critic, reference.critic_kind = None, "none"
        reference.requires_grad_(False)
        sharding.shard(reference, self.parallel.world, self.parallel.device)
        if state is None:
            reference.model.load_state_dict(self.policy.model.state_dict())
        else:
            sharding.load_full_state_dict(reference, state)
        self.reference = reference

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def policy_state(self) -> dict[str, Tensor]:
        """Return the policy's tensors by name, without weights that adapters leave frozen. They may be sharded."""
        return sharding.state_dict(self.policy, without=self.policy.frozen())

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors from `policy_state`."""
        sharding.load_full_state_dict(self.policy, state, without=self.policy.frozen())

    def reference_state(self) -> dict[str, Tensor]:
        """Return the reference policy's tensors by name; with adapters, only the adapters. They may be sharded."""
        if isinstance(self.reference, Policy):
            return sharding.state_dict(self.reference)
        return {} if self.reference is None else self.reference.state_dict()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimiser's tensors by name, which may be sharded, and JSON values."""
        tensors, values = flatten_optimizer(sharding.optimizer_state(self.policy, self.optimizer))
        return tensors, {"generator": self.generator.get_state().tolist(), "optimizer": values}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values from `state`."""
        self.generator.set_state(torch.tensor(values["generator"], dtype=torch.uint8))
        keys = ("rate", "betas", "eps", "weight_decay")
        group_settings = [{key: group[key] for key in keys} for group in self.optimizer.param_groups]
        sharding.load_optimizer_state(self.policy, self.optimizer, unflatten_optimizer(tensors, values["optimizer"]))
        # Keep the rates that are configured now, which may differ from the checkpoint's.
        for group, settings in zip(self.optimizer.param_groups, group_settings, strict=True):
            group |= settings

    @torch.no_grad()
    def log_likelihoods(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], images: Images | None = None
    ) -> list[float]:
        """Return the log-probability of each continuation after its prompt, in nats. Ids below 0 refer to images."""
        samples = [Sample.of(*pair, images) for pair in zip(prompts, continuations, strict=True)]
        return self.logprobs(Batch.from_samples(samples, self.parallel.device)).sum(1).tolist()

    # --- scoring: ranks share the work --------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: Batch, table: RolloutBatch, mask_BT: Tensor | None = None) -> None:
        """Fill in the table's log-probabilities and values under the policies before the update.

        Args:
            mask_BT: Mask of the tokens that belong to this policy's agent (bool [B, T]); None is all tokens.
        """
        mask_BT = table.mask_BT if mask_BT is None else mask_BT
        logprobs_BT = self.logprobs(batch, mask_BT=mask_BT, table=table if self.algorithm.needs_critic else None)
        table.old_logprobs_BT = torch.where(mask_BT, logprobs_BT, table.old_logprobs_BT)
        if self.reference is not None and self.algorithm.needs_reference:
            reference_BT = self.logprobs(batch, mask_BT=mask_BT, model=self.reference)
            table.ref_logprobs_BT = _put(reference_BT, table.ref_logprobs_BT, mask_BT)
        if self.teacher is not None and self.algorithm.has_teacher:
            teacher_BT = self.teacher.logprobs(self.logprobs, batch, table, mask_BT)
            table.teacher_logprobs_BT = _put(teacher_BT, table.teacher_logprobs_BT, mask_BT)
        table.bootstrap_B = self._bootstrap(batch)

    @torch.no_grad()
    def logprobs(
        self,
        batch: Batch,
        rows: Sequence[int] | None = None,
        *,
        mask_BT: Tensor | None = None,
        model: Policy | FirstAdapters | None = None,
        table: RolloutBatch | None = None,
    ) -> Tensor:
        """Return the log-probabilities [B, T] of sampled tokens under the current policy; 0 elsewhere.

        Args:
            rows: Rows of the batch to read; by default all.
            mask_BT: Samples without a token in this mask (bool) are not read.
            model: Another policy, such as the reference policy.
            table: Receives the critic's values, which the same pass computes.
        """
        logprobs_BT = torch.zeros(batch.mask_BT.shape, device=batch.device)
        values_BT = None if table is None else torch.zeros_like(logprobs_BT)
        for block, counts in self._share(batch, range(len(batch)) if rows is None else rows, mask_BT):
            if values_BT is None:
                scores = (model or self.policy).score(*block.inputs, temperature=self.temperature)
            else:
                scores = self.policy.score(*block.inputs, temperature=self.temperature, values=True)
            if counts:
                logprobs_BT[block.rows] += block.in_rows(scores.logprobs_N.float())
                if table is not None and values_BT is not None:
                    assert scores.values_N is not None
                    heads = self.algorithm.value_heads
                    values_BT[block.rows] += values_in_rows(block, scores.values_N, table, heads=heads)
        if table is not None and values_BT is not None:
            table.values_BT = self.parallel.sum(values_BT)
        return self.parallel.sum(logprobs_BT)

    def _bootstrap(self, batch: Batch) -> Tensor:
        """Return the critic's value of the state in which an episode was truncated; 0 for other episodes."""
        values = torch.zeros(len(batch), device=batch.device)
        if self.algorithm.critic is None or not self.algorithm.critic.bootstrap_truncated:
            return values
        rows = [row for row, episode in enumerate(batch.episodes) if episode.tail and not episode.terminated]
        tails = [batch.episodes[row].tail for row in rows]
        heads = [[] if batch.episodes[row].tail_fresh else batch.samples[row][-1].tokens for row in rows]
        images = [{**batch.samples[row][-1].images, **by_key([batch.episodes[row].final_image])} for row in rows]
        # A value refers to the context before a token, so append one token. Its id does not matter.
        tail_batch = Batch.from_samples(
            [Sample.of(head + tail, tail[-1:], image) for head, tail, image in zip(heads, tails, images, strict=True)],
            batch.device,
        )
        for block, counts in self._share(tail_batch, range(len(tail_batch))):
            scores = self.policy.score(*block.inputs, temperature=self.temperature, values=True)
            assert scores.values_N is not None
            if counts:
                first_N = scores.values_N.float().view(len(block.rows), -1)[:, 0]  # the head of a turn's beginning
                values[[rows[row] for row in block.rows]] = first_N
        return self.parallel.sum(values)

    def _share(self, batch: Batch, rows: Sequence[int], mask_BT: Tensor | None = None) -> Iterator[tuple[Block, bool]]:
        """Yield this rank's micro-batches of these rows, and whether each one counts; see `Parallel.share`."""
        budget, tokens_read = self.config.micro_batch_tokens, self.policy.tokens_read
        for indices, counts in self.parallel.share(batch.micro_batches(rows, budget, tokens_read, mask_BT)):
            yield batch.block(indices), counts

    # --- one optimiser step -------------------------------------------------------------------------------------------

    def set_rate(self, factor: float) -> float:
        """Multiply the configured learning rates by a factor, and return the policy's new rate."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = parameters["rate"] * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def take_step(
        self,
        batch: Batch,
        table: RolloutBatch,
        rows: Sequence[int],
        *,
        mask_BT: Tensor | None = None,
        version: int,
        scale: float,
        finds: bool = False,
    ) -> dict[str, float]:
        """Take an optimiser step on these rows, and return metrics.

        Args:
            table: Table of the episodes, with advantages.
            mask_BT: See `accumulate`.
            finds: See `accumulate`. The log-probabilities that it finds are compared with the sampler's.

        Raises:
            LogprobGap: They differ too much.
        """
        self.optimizer.zero_grad(set_to_none=True)
        metrics, logprobs_BT = self.accumulate(batch, table, rows, mask_BT=mask_BT, scale=scale, finds=finds)
        if logprobs_BT is not None:
            rows_BT = in_rows(rows, table.mask_BT if mask_BT is None else mask_BT)
            metrics |= self.check_sampler(batch, table, logprobs_BT, version, rows_BT)
        return metrics | self._step()

    def _step(self) -> dict[str, float]:
        """Clip the gradients and take the optimiser step."""
        # Clip separately, because the critic's gradient can be 100 times the policy's, and a common bound would scale
        # the policy's to almost 0.
        parts = (list(self.policy.trained_parameters()), list(self.policy.critic_parameters()))
        bound = self.config.max_grad_norm
        norms = [float(sharding.clip_grad_norm(part, bound)) if part else 0.0 for part in parts]
        finite = all(map(math.isfinite, norms))
        if finite:
            self.optimizer.step()
        metrics = {"update/nonfinite": float(not finite), "update/grad_norm": norms[0]}
        return metrics | ({"critic/grad_norm": norms[1]} if self.algorithm.needs_critic else {})

    def accumulate(
        self,
        batch: Batch,
        table: RolloutBatch,
        rows: Sequence[int],
        *,
        mask_BT: Tensor | None = None,
        scale: float = 1.0,
        components: Container[str] = LOSS_TERMS,
        finds: bool = False,
        part: Sequence[int] | None = None,
    ) -> tuple[dict[str, float], Tensor | None]:
        """Add the gradient of one optimiser step's loss over these rows, or of some of its components.

        Args:
            table: Table of the episodes, with advantages. It receives each token's ratio and marks.
            mask_BT: Mask of the tokens that belong to this policy's agent (bool). By default, all do.
            finds: Whether this is the first step of an update without scores. Then this pass itself computes the
                log-probabilities before the update.
            part: Rows whose share of the gradient is added; None: all. Means are still taken over all rows, so the
                gradients of several parts add up to that of the step.

        Returns:
            Metrics, and these log-probabilities [B, T], 0 in other rows; None unless `finds` is set.
        """
        mask_BT = table.mask_BT if mask_BT is None else mask_BT
        part = rows if part is None else part
        step_loss = StepLoss(
            self.algorithm,
            batch,
            table,
            rows,
            mask_BT=mask_BT,
            scale=scale,
            branch_weight=self.branches.weight,
            max_length=self.max_length,
            components=components,
            finds=finds,
            device=self.parallel.device,
        )
        if self.algorithm.loss.couples_turns:
            step_loss.default_BT = self._current_logprobs(batch, part, mask_BT, step_loss.default_BT)
        table.clear_marks(part, mask_BT)
        for block, counts in self._share(batch, part, mask_BT):
            scores = self.policy.score(
                *block.inputs, temperature=self.temperature, entropy=True, values=self.algorithm.needs_critic
            )
            step_loss.of_block(block, scores, counts).backward()  # type: ignore[no-untyped-call]
        found_BT = step_loss.found_BT
        return step_loss.sums.reduce(self.parallel), None if found_BT is None else self.parallel.sum(found_BT)

    @torch.no_grad()
    def _current_logprobs(self, batch: Batch, rows: Sequence[int], mask_BT: Tensor, default_BT: Tensor) -> Tensor:
        """Return log-probabilities [B, T] of these rows under the current policy, and `default_BT` for other rows.

        A row with a single sample is never split among blocks. It keeps `default_BT` as well and is not scored.
        """
        samples = batch.samples_in(mask_BT)
        if not (split_rows := [row for row in rows if samples[row] > 1]):
            return default_BT
        logprobs_BT = self.logprobs(batch, split_rows, mask_BT=mask_BT)
        return torch.where(in_rows(split_rows, torch.ones_like(mask_BT)), logprobs_BT, default_BT)


def _put(values_BT: Tensor, column_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    """Return a column of a table with other values in the mask. None is a column of zeros."""
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT) if column_BT is None else column_BT)


def check_logprob_gaps(config: OptimizerConfig, gaps_N: Tensor) -> dict[str, float]:
    """Return metrics of the differences between sampler and trainer on each fresh token, in nats.

    Raises LogprobGap if the mean or the 0.99 quantile is too large. The maximum is not checked, because with many
    tokens in bfloat16 a few exceed any bound by chance.
    """
    metrics = {
        "policy/logprob_gap_mean": gaps_N.mean().item(),
        "policy/logprob_gap_q99": _quantile(gaps_N, 0.99),
        "policy/logprob_gap_max": gaps_N.max().item(),
    }
    for name, words in (("mean", "on average"), ("q99", "at the 0.99 quantile")):
        key = f"max_logprob_gap_{name}"
        bound, gap = getattr(config, key), metrics[f"policy/logprob_gap_{name}"]
        if not gap <= bound:
            raise LogprobGap(
                f"the sampler's and the trainer's log-probabilities differ by {gap:.3g} nats {words}, more than "
                f"optimizer.{key} ({bound:g}): the engine does not run the weights or the sampling settings that are "
                "trained. If it only rounds more coarsely, set model.float32_logits or raise the bound"
            )
    return metrics


def _quantile(values_N: Tensor, share: float) -> float:
    """Return the smallest value v for which at least this share of all values is <= v; NaN if any is NaN."""
    if values_N.isnan().any():
        return math.nan
    return values_N.kthvalue(max(1, math.ceil(share * values_N.numel()))).values.item()
