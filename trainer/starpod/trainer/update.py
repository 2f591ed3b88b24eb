"""One policy update from collected groups: score, advantages, losses, optimiser steps.

Every mean is taken over the whole batch of an optimiser step, before it is split into micro-batches and among ranks.
Each token carries its weight, and a loss is a weighted sum. The gradient therefore does not depend on the packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.hae import stages
from starpod.trainer.algorithms.losses import (
    correction_weights,
    kl_coefficients,
    kl_divergence,
    proximal_logprobs,
    token_weights,
    value_loss,
)
from starpod.trainer.checkpoints.state import flatten_optimizer, unflatten_optimizer
from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch, Sample, Unpacked
from starpod.trainer.data.images import Images, by_key
from starpod.trainer.data.updates import UpdateRecord
from starpod.trainer.models.first_adapters import FirstAdapters
from starpod.trainer.models.policy import CriticKind, Policy
from starpod.trainer.optimizer import OptimizerConfig
from starpod.trainer.parallel import Parallel
from starpod.trainer.rollout.config import PivotsConfig

LOSS_TERMS = ("task", "entropy", "kl", "critic")
"""Components of the loss."""

CRITIC_LR: dict[CriticKind, float] = {"shared": 1e-3, "separate": 1e-5}
"""Default learning rates of critics. A head alone starts at zero and would not learn at the rate of a whole model."""


class LogprobGap(Exception):
    """The log-probabilities of sampler and trainer differ, so updates from these samples would be wrong."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a batch under the models before the update; see RolloutBatch."""

    logprobs_BT: Tensor
    values_BT: Tensor | None
    ref_logprobs_BT: Tensor | None
    bootstrap_B: Tensor


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Result of accumulating the gradient of one optimiser step."""

    metrics: dict[str, float]
    logprobs_BT: Tensor | None
    """The policy's log-probabilities if `finds` was set, else None. They are 0 in rows outside this step."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Episodes whose loss is a separate mean."""

    batch: Batch
    rollout: RolloutBatch
    advantages: Advantages
    weight: float = 1.0
    """Weight of the loss."""
    record: UpdateRecord | None = None
    """Receives each token's ratio and clipping."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step of an agent's policy."""

    agent: str
    parts: Sequence[tuple[Stream, Sequence[int]]]
    """Streams whose losses are added up, each with its rows in this step. The first one provides the step's metrics."""
    metrics: dict[str, float]
    """Further metrics, such as those of scoring."""
    finds: bool = False
    """Whether this is the first step of an update without scores; see `PolicyTrainer.accumulate`."""


class PolicyTrainer:
    """Scoring and optimiser steps of one policy. It owns the optimiser.

    `reference` is None until `freeze_reference`.

    Args:
        temperature: Temperature of sampling, so that the trained distribution is the sampled one.
        max_length: Longest context in tokens. The loss average `seq-mean-token-sum-norm` divides by it.
        make_reference: Builds the frozen policy of the KL term, with any weights. Only used without adapters.
        branches: How advantages of branches are scaled and their loss weighted.
        criteria_weights: See `Config.criteria_weights`.
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
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.config = optimizer
        self.parallel = parallel
        self.temperature = temperature
        self.max_length = max_length
        self.branches = branches or PivotsConfig()
        self.criteria_weights = criteria_weights or {}
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
        """Use another algorithm, other rates and other weights from now on. The optimiser keeps its state."""
        self.algorithm, self.config, self.criteria_weights = algorithm, optimizer, criteria_weights
        for parameters, rate in zip(self.optimizer.param_groups, self._rates(optimizer), strict=False):
            parameters["rate"] = rate

    # --- the batch ----------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Return a batch scored with the current policy, and metrics of the scoring. Raises LogprobGap."""
        scores, raw_rollout = self.score(batch), self.unscored(batch)
        metrics = self._check_sampler(batch, raw_rollout.sampler_logprobs_BT, scores.logprobs_BT, version)
        rollout = replace(
            raw_rollout,
            old_logprobs_BT=scores.logprobs_BT,
            bootstrap_B=scores.bootstrap_B,
            values_BT=scores.values_BT,
            ref_logprobs_BT=scores.ref_logprobs_BT,
        )
        return rollout, metrics

    def unscored(self, batch: Batch) -> RolloutBatch:
        """Return a batch with only the engine's log-probabilities."""
        return RolloutBatch.of(batch, self.criteria_weights, blocks=bool(self.algorithm.blocks))

    def _check_sampler(
        self,
        batch: Batch,
        sampler_BT: Tensor,
        logprobs_BT: Tensor,
        version: int,
        rows: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Compare the engine's log-probabilities of this version's tokens with the policy's. Raises LogprobGap.

        rows: rows to compare; None means all.
        """
        versions = [[v for turn in episode.own_turns for v in turn.versions] for episode in batch.episodes]
        fresh_BT = batch.rows(versions, -1, torch.int64).eq(version) & batch.mask_BT
        if rows is not None:
            rows_B1 = torch.zeros(len(batch), 1, dtype=torch.bool, device=batch.device)
            rows_B1[list(rows)] = True
            fresh_BT = fresh_BT & rows_B1
        gaps = (logprobs_BT - sampler_BT).abs()[fresh_BT]
        return check_logprob_gaps(self.config, gaps) if gaps.numel() else {}

    def freeze_reference(self, state: Mapping[str, Tensor] | None) -> None:
        """Set the KL term's reference policy from `reference_state`, or to the current policy if `state` is None."""
        if self.policy.frozen():
            adapters = self.reference = FirstAdapters(self.policy, self.parallel)
            if state is not None:
                adapters.load_state_dict(state)
            return
        assert self._make_reference is not None
        reference = self._make_reference()
        reference.critic, reference.critic_kind = None, "none"
        reference.requires_grad_(False)
        self.parallel.shard(reference)
        if state is None:
            reference.model.load_state_dict(self.policy.model.state_dict())
        else:
            self.parallel.load_full_state_dict(reference, state)
        self.reference = reference

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def policy_state(self) -> dict[str, Tensor]:
        """Return the policy's tensors by name, without weights that adapters leave frozen. They may be sharded."""
        return self.parallel.state_dict(self.policy, without=self.policy.frozen())

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors from `policy_state`."""
        self.parallel.load_full_state_dict(self.policy, state, without=self.policy.frozen())

    def reference_state(self) -> dict[str, Tensor]:
        """Return the reference policy's tensors by name; with adapters, only the adapters. They may be sharded."""
        if isinstance(self.reference, Policy):
            return self.parallel.state_dict(self.reference)
        return {} if self.reference is None else self.reference.state_dict()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimiser's tensors by name, which may be sharded, and JSON values."""
        tensors, values = flatten_optimizer(self.parallel.optimizer_state(self.policy, self.optimizer))
        return tensors, {"generator": self.generator.get_state().tolist(), "optimizer": values}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values from `state`."""
        self.generator.set_state(torch.tensor(values["generator"], dtype=torch.uint8))
        keys = ("rate", "betas", "eps", "weight_decay")
        group_settings = [{key: group[key] for key in keys} for group in self.optimizer.param_groups]
        self.parallel.load_optimizer_state(
            self.policy, self.optimizer, unflatten_optimizer(tensors, values["optimizer"])
        )
        # Keep the rates that are configured now, which may differ from the checkpoint's.
        for group, settings in zip(self.optimizer.param_groups, group_settings, strict=True):
            group |= settings

    @torch.no_grad()
    def log_likelihoods(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], images: Images | None = None
    ) -> list[float]:
        """Return the log-probability of each continuation after its prompt, in nats.

        images: the images that ids below 0 refer to.
        """
        samples = [Sample.of(*pair, images) for pair in zip(prompts, continuations, strict=True)]
        batch = Batch.from_samples(samples, self.parallel.device)
        sums = torch.zeros(len(batch), device=batch.device)
        for block, counts in self._share(batch, range(len(batch))):
            scores = self.policy.score(*batch.pack(block), temperature=self.temperature)
            if counts:
                unpacked = batch.unpack(block)
                sums[unpacked.rows] += unpacked.in_rows(scores.logprobs_N).sum(1)
        return self.parallel.sum(sums).tolist()

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: Batch) -> Scored:
        """Return log-probabilities and values of all sampled tokens under the current policy. Ranks share the work."""
        critic = self.algorithm.needs_critic
        logprobs = torch.zeros(batch.mask_BT.shape, device=batch.device)
        values = torch.zeros_like(logprobs) if critic else None
        needs_reference = self.reference is not None and self.algorithm.needs_reference
        reference = torch.zeros_like(logprobs) if needs_reference else None
        blocks = batch.blocks_BT() if self.algorithm.value_heads > 1 else None
        for block, counts in self._share(batch, range(len(batch))):
            packed, unpacked = batch.pack(block), batch.unpack(block)
            scores = self.policy.score(*packed, temperature=self.temperature, values=critic)
            if counts:
                logprobs[unpacked.rows] += unpacked.in_rows(scores.logprobs_N.float())
                if values is not None and scores.values_N is not None:
                    values[unpacked.rows] += _values_in_rows(unpacked, scores.values_N.float(), blocks)
            if reference is not None and self.reference is not None:
                scores = self.reference.score(*packed, temperature=self.temperature)
                if counts:
                    reference[unpacked.rows] += unpacked.in_rows(scores.logprobs_N.float())
        for tensor in (logprobs, values, reference):
            if tensor is not None:
                self.parallel.sum(tensor)
        return Scored(logprobs, values, reference, self._bootstrap(batch))

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
            scores = self.policy.score(*tail_batch.pack(block), temperature=self.temperature, values=True)
            assert scores.values_N is not None
            if counts:
                first_N = scores.values_N.float().view(len(block), -1)[:, 0]  # the head of a turn's beginning
                values[[rows[row] for row in tail_batch.unpack(block).rows]] = first_N
        return self.parallel.sum(values)

    def _share(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Yield this rank's micro-batches of these rows, and whether each one counts; see `Parallel.share`."""
        return self.parallel.share(batch.micro_batches(rows, self.config.micro_batch_tokens, self.policy.tokens_read))

    # --- one optimiser step -------------------------------------------------------------------------------------------

    def set_rate(self, factor: float) -> float:
        """Multiply the configured learning rates by a factor, and return the policy's new rate."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = parameters["rate"] * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def take(self, step: Step, *, version: int, scale: float) -> dict[str, float]:
        """Take an optimiser step, and return metrics. Arguments and exceptions are those of `Learner.learn`."""
        self.optimizer.zero_grad(set_to_none=True)
        result, *branch_results = [
            self.accumulate(stream, rows, scale=scale * stream.weight, finds=step.finds)
            for stream, rows in step.parts
            if rows
        ]
        metrics = step.metrics | result.metrics
        if result.logprobs_BT is not None:
            stream, rows = step.parts[0]
            sampler_BT = stream.rollout.sampler_logprobs_BT
            metrics |= self._check_sampler(stream.batch, sampler_BT, result.logprobs_BT, version, rows)
        for branch_result in branch_results:
            metrics["update/branch_loss"] = branch_result.metrics["update/loss"]
        return metrics | self._step()

    def _step(self) -> dict[str, float]:
        """Clip the gradients and take the optimiser step."""
        # Clip separately, because the critic's gradient can be 100 times the policy's, and a common bound would scale
        # the policy's to almost 0.
        parts = (list(self.policy.trained_parameters()), list(self.policy.critic_parameters()))
        bound = self.config.max_grad_norm
        norms = [float(self.parallel.clip_grad_norm(part, bound)) if part else 0.0 for part in parts]
        finite = all(map(math.isfinite, norms))
        if finite:
            self.optimizer.step()
        metrics = {"update/nonfinite": float(not finite), "update/grad_norm": norms[0]}
        return metrics | ({"critic/grad_norm": norms[1]} if self.algorithm.needs_critic else {})

    def accumulate(
        self,
        stream: Stream,
        rows: Sequence[int],
        *,
        scale: float,
        components: Container[str] = LOSS_TERMS,
        finds: bool = False,
    ) -> Accumulated:
        """Add the gradient of one optimiser step's loss over these rows, or of some of its components.

        Args:
            stream: The whole batch, with its rollout data and advantages.
            rows: Rows of this step.
            scale: Factor of the loss.
            components: Components of the loss to include.
            finds: Whether this is the first step of an update without scores. Then this pass itself computes the
                log-probabilities before the update. Ratios and corrections refer to them, except in mode `bypass`.
        """
        batch, rollout, advantages, record = stream.batch, stream.rollout, stream.advantages, stream.record
        algorithm = self.algorithm
        mask_BT = trained_BT = batch.mask_BT[list(rows)]
        if algorithm.mask_truncated:
            trained_BT = mask_BT & ~batch.truncated_BT()[list(rows)]
        weights_BT = torch.zeros_like(rollout.old_logprobs_BT)
        weights_BT[list(rows)] = scale * token_weights(trained_BT, algorithm.loss_average, max_length=self.max_length)
        value_weights_BT = torch.zeros_like(weights_BT)
        value_weights_BT[list(rows)] = scale * token_weights(
            advantages.value_mask_BT[list(rows)], "token-mean", max_length=1
        )
        turn_weights_BT, returns_BT = batch.weights_BT, advantages.returns_BT
        sampler_BT = rollout.sampler_logprobs_BT
        correction_BT = correction_weights(algorithm.correction, rollout.old_logprobs_BT, sampler_BT, rollout.mask_BT)
        proximal_BT = proximal_logprobs(algorithm.correction, rollout)
        step_logprobs_BT = torch.zeros_like(weights_BT) if finds else None
        # Sequence-level ratios need all turns of an episode. Turns packed into other blocks contribute these
        # precomputed log-probabilities.
        default_logprobs_BT = (
            self._current_logprobs(batch, rows, proximal_BT) if algorithm.objective.couples_turns else proximal_BT
        )
        sums, kl = Sums(self.parallel.device), kl_coefficients(algorithm.kl, rollout)
        if record is not None:
            record.forget(rows)
        for block, counts in self._share(batch, rows):
            scores = self.policy.score(
                *batch.pack(block), temperature=self.temperature, entropy=True, values=algorithm.needs_critic
            )
            unpacked = batch.unpack(block)
            indices, inside_RT = unpacked.rows, unpacked.inside_RT
            logprobs_RT = unpacked.in_rows(scores.logprobs_N.float(), fill=default_logprobs_BT[indices])
            assert scores.entropy_N is not None
            entropy_RT = unpacked.in_rows(scores.entropy_N.float())
            old_RT, correction_RT = proximal_BT[indices], correction_BT[indices]
            if step_logprobs_BT is not None:
                current_RT, mask_RT = logprobs_RT.detach(), rollout.mask_BT[indices]
                step_logprobs_BT[indices] += torch.where(inside_RT, current_RT, 0.0) * float(counts)
                correction_RT = correction_weights(algorithm.correction, current_RT, sampler_BT[indices], mask_RT)
                old_RT = old_RT if algorithm.correction.mode == "bypass" else current_RT
            result = algorithm.policy_loss(
                logprobs_RT,
                old_RT,
                advantages.advantages_BT[indices],
                mask_BT=rollout.mask_BT[indices],
                turns_BT=rollout.turns_BT[indices],
            )
            if record is not None and counts:
                record.add(indices, inside_RT, result, weights_BT[indices] * correction_RT != 0)
            per_token_RT = result.per_token_BT * correction_RT * float("task" in components)
            if turn_weights_BT is not None:
                per_token_RT = per_token_RT * turn_weights_BT[indices]
            if "kl" in components and algorithm.kl.where == "loss" and rollout.ref_logprobs_BT is not None:
                divergence_RT = kl_divergence(algorithm.kl.estimator, logprobs_RT, rollout.ref_logprobs_BT[indices])
                per_token_RT = per_token_RT + (kl[indices] if isinstance(kl, Tensor) else kl) * divergence_RT
            if "entropy" in components and algorithm.entropy_coefficient:
                per_token_RT = per_token_RT - algorithm.entropy_coefficient * entropy_RT
            loss = (weights_BT[indices] * per_token_RT)[inside_RT].sum()
            sums.add("update/loss", loss, counts)
            critic = algorithm.critic
            if "critic" in components and critic and returns_BT is not None and rollout.values_BT is not None:
                assert scores.values_N is not None
                has_stages = self.algorithm.value_heads > 1
                values_RT = _values_in_rows(
                    unpacked, scores.values_N.float(), rollout.blocks_BT if has_stages else None
                )
                error_RT = value_loss(values_RT, rollout.values_BT[indices], returns_BT[indices], critic.value_clip)
                critic_loss = (value_weights_BT[indices] * error_RT)[inside_RT].sum()
                sums.add("critic/loss", critic_loss, counts)
                loss = loss + critic.value_coefficient * critic_loss
            (loss * float(counts)).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                mean_weights_RT = inside_RT / mask_BT.sum()
                sums.add("policy/entropy", (entropy_RT * mean_weights_RT).sum(), counts)
                sums.add("policy/kl", (kl_divergence("k3", old_RT, logprobs_RT) * mean_weights_RT).sum(), counts)
                sums.add("policy/clip_fraction_low", (result.clipped_low_BT * mean_weights_RT).sum(), counts)
                sums.add("policy/clip_fraction_high", (result.clipped_high_BT * mean_weights_RT).sum(), counts)
                sums.add("policy/ratio_max", result.ratio_BT[inside_RT].max(), counts)
        metrics = sums.reduce(self.parallel)
        return Accumulated(metrics, None if step_logprobs_BT is None else self.parallel.sum(step_logprobs_BT))

    @torch.no_grad()
    def _current_logprobs(self, batch: Batch, rows: Sequence[int], default_BT: Tensor) -> Tensor:
        """Return log-probabilities [B, T] of these rows under the current policy, and `default_BT` for other rows.

        A row with a single sample is never split among blocks. It keeps `default_BT` as well and is not scored.
        """
        split_rows = [row for row in rows if len(batch.samples[row]) > 1]
        if not split_rows:
            return default_BT
        logprobs_BT = torch.zeros_like(default_BT)
        for block, counts in self._share(batch, split_rows):
            scores = self.policy.score(*batch.pack(block), temperature=self.temperature)
            if counts:
                unpacked = batch.unpack(block)
                logprobs_BT[unpacked.rows] += unpacked.in_rows(scores.logprobs_N.float())
        self.parallel.sum(logprobs_BT)
        mask_B1 = torch.zeros(len(batch), 1, dtype=torch.bool, device=batch.device)
        mask_B1[split_rows] = True
        return torch.where(mask_B1, logprobs_BT, default_BT)


def advantages_by_kind(config: AlgorithmConfig, rollout: RolloutBatch) -> Advantages:
    """Return the advantages of a batch, computed separately per kind of episode so as not to mix environments."""
    rows: dict[str, list[int]] = {}
    for row, episode in enumerate(rollout.episodes):
        rows.setdefault(episode.kind, []).append(row)
    if len(rows) == 1:
        return compute_advantages(config, rollout)
    parts = [compute_advantages(config, rollout.rows(kind_rows)) for kind_rows in rows.values()]
    order = torch.tensor([row for kind_rows in rows.values() for row in kind_rows]).argsort().to(rollout.mask_BT.device)
    returns = [part.returns_BT for part in parts if part.returns_BT is not None]
    return Advantages(
        torch.cat([part.advantages_BT for part in parts])[order],
        torch.cat(returns)[order] if returns else None,
        torch.cat([part.value_mask_BT for part in parts])[order],
    )


def _values_in_rows(unpacked: Unpacked, values: Tensor, blocks_BT: Tensor | None) -> Tensor:
    """Return a block's values as rows [R, T]. blocks_BT: selects each token's head if the critic has several."""
    if blocks_BT is None:
        return unpacked.in_rows(values)
    values_RTH = torch.stack([unpacked.in_rows(values_N) for values_N in values.unbind(1)], dim=2)
    return values_RTH.gather(2, stages(blocks_BT[unpacked.rows]).unsqueeze(2)).squeeze(2)


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
