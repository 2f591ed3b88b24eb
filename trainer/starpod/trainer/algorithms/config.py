"""Configuration of the algorithm: an estimator, a loss, and what they share. Presets are files of configs/algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from starpod.trainer.algorithms.distillation import NoTeacher, Teaching
from starpod.trainer.algorithms.estimators import GAE, Advantage, CriticEstimator
from starpod.trainer.algorithms.objectives import PPO, Loss, LossInputs
from starpod.trainer.algorithms.sections import KL, Correction, DynamicSamplingConfig, Filter, KeepAll, NoKL
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.configuration.layers import Layers
from starpod.trainer.configuration.section import ConfigError, Contradiction, Section, find_broken, packaged_configs
from starpod.trainer.configuration.user_file import names_file
from starpod.trainer.prompts.grammar import Block

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.algorithms.losses import PolicyLoss

DEFAULT_PRESET = "starpo-s"


class AlgorithmConfig(Section):
    """How gradients are computed from episodes."""

    SHORTHAND: ClassVar[str] = "preset"
    BASES: ClassVar[str] = "algorithm"

    preset: str = Field(
        default=DEFAULT_PRESET,
        description="Method whose file gives the keys of this section their values, unless you set them.",
        examples=[*packaged_configs(BASES)],
    )

    advantage: Advantage = Field(
        default=GAE(),
        description="Estimator of advantages. gae, bilevel_gae and hae train a critic. The others compare the "
        "episodes of a group, or their turns. terms: comparisons that you choose; FILE.py:NAME: a "
        "function of yours.",
    )
    whiten: bool = Field(
        default_factory=lambda data: data["advantage"].whitening[0],
        description="Normalises the advantages of all tokens to mean 0 and deviation 1. Unless you set it, it is "
        "on with a critic and in reinforce_plus_plus.",
    )

    loss: Loss = Field(
        default=PPO(),
        description="Loss of the policy. ppo: clips a ratio per token; gspo: clips a ratio per episode; cispo: "
        "bounds the weight of a token; dppo: bounds the divergence at a token; FILE.py:NAME: a "
        "function of yours.",
    )
    mask_truncated: bool = Field(
        default=False, description="Excludes replies that a token limit cut from the policy's loss."
    )
    kl: KL = Field(default=NoKL(), description="Penalty for leaving the first policy (KL), in the reward or the loss.")
    entropy_coefficient: float = Field(default=0.001, ge=0, description="Weight of the entropy bonus.")
    distillation: Teaching = Field(
        default=NoTeacher(),
        description="On-policy distillation: a teacher scores each token that the policy samples. model: a model "
        "beside the policy; vllm: one on a vLLM server; self: the policy with a hint in its prompt; off: none.",
    )

    filter: Filter = Field(
        default=KeepAll(),
        description="Groups to train on. none: all; top_fraction, top_p: those in which the returns differ most "
        "(standard deviation).",
    )
    filter_loss_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="linear: scales the loss by the share of groups kept; sqrt: by its square root."
    )
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    correction: Correction = Field(
        default_factory=lambda data: data["loss"].usual_correction,
        description="Importance weights of tokens, because an older policy or another program sampled them. tis: "
        "up to a cap; mis, icepop: 0 outside bounds; geometric: 0 for whole episodes; bypass: none, "
        "and ratios refer to the sampler; off: none. Unless you set it, bypass in dppo, else tis.",
    )

    epochs: int = Field(default=1, ge=1, description="Number of times that an update passes over the episodes.")
    order: Literal["together", "reverse_turns", "forward_turns"] = Field(
        default="together",
        description="together: each step trains on whole episodes; reverse_turns, forward_turns: a step for each "
        "turn, from the last or from the first one on (SeeUPO).",
    )
    mini_batch_size: int = Field(
        default=32,
        ge=1,
        description="Number of episodes per optimiser step. A pass is split into equal steps of about this size.",
    )

    # --- requirements ------------------------------------------------------------------------------------------------

    def steps(self, episodes: int) -> int:
        """Return the number of optimiser steps, of nearly equal size, in a pass over the episodes; at least one."""
        return max(1, (episodes + self.mini_batch_size // 2) // self.mini_batch_size)

    def scores_first(self, episodes: int) -> bool:
        """Return whether an update of this number of episodes needs a scoring pass before its first step.

        An update with a single step takes the old log-probabilities from that step's forward pass, so that all ratios
        are exactly 1. Correction `bypass` uses the sampler's. A critic, a reference policy, a teacher, and losses over
        whole episodes need the scoring pass.
        """
        whole_episodes = self.loss.couples_turns or self.correction.level == "sequence"
        is_single_step = self.epochs * self.steps(episodes) == 1
        skips_scoring = self.correction.mode == "bypass" or (is_single_step and not whole_episodes)
        return self.needs_critic or self.needs_reference or self.has_teacher or not skips_scoring

    @property
    def critic(self) -> CriticEstimator | None:
        """The estimator, if it has a critic; else None."""
        return self.advantage if isinstance(self.advantage, CriticEstimator) else None

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator has a critic."""
        return self.critic is not None

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        """Terms of an estimator without a critic; empty for one with a critic or from a user's file."""
        return self.advantage.credit_terms

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy is needed."""
        return self.kl.where != "off"

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher judges the policy's tokens."""
        return not isinstance(self.distillation, NoTeacher)

    @property
    def needs_state_key(self) -> bool:
        """Whether environments must report the digest of each state."""
        return any("state" in term.key for term in self.credit_terms)

    @property
    def may_read_state_key(self) -> bool:
        """Whether the estimator comes from a user's file. It then gets state keys if the environment reports them."""
        return names_file(self.advantage.kind)

    @property
    def blocks(self) -> frozenset[Block]:
        """Blocks of replies that get separate credit. Turns must record which tokens belong to these blocks."""
        if first := self.advantage.first_blocks:
            return frozenset({*first, "answer"})
        return frozenset(term.block for term in self.credit_terms if term.block is not None)

    @property
    def value_heads(self) -> int:
        """Number of values that the critic returns per token."""
        return max(1, self.advantage.heads)

    def policy_loss(
        self,
        logprobs_BT: Tensor,
        old_logprobs_BT: Tensor,
        advantages_BT: Tensor,
        *,
        mask_BT: Tensor,
        turns_BT: Tensor,
    ) -> PolicyLoss:
        """Return the loss of each token. Gradients only flow through logprobs_BT.

        Args:
            logprobs_BT: Log-probabilities under the policy that learns.
            old_logprobs_BT: Log-probabilities under the policy that ratios refer to.
            mask_BT: Mask of the sampled tokens (bool).
            turns_BT: Turn of each token, from 0; -1 for padding.
        """
        inputs = LossInputs(logprobs_BT, old_logprobs_BT.detach(), advantages_BT.detach(), mask_BT, turns_BT)
        return self.loss.per_token(inputs)

    # --- validation --------------------------------------------------------------------------------------------------

    @model_validator(mode="wrap")
    @classmethod
    def _over_its_preset(cls, values: Any, handler: ModelWrapValidatorHandler[AlgorithmConfig]) -> AlgorithmConfig:
        if isinstance(values, str):
            values = {cls.SHORTHAND: values}
        if isinstance(values, Mapping):
            layers = Layers(cls)
            try:
                layers.add("", {cls.SHORTHAND: DEFAULT_PRESET, **values})
            except ConfigError as error:
                raise ValueError(str(error)) from None
            values = layers.values
        config = handler(values)
        if sentence := find_broken(_CONTRADICTIONS, config):
            raise ValueError(sentence)
        return config


_ORDER = "algorithm.order {c.order} takes a step on each turn"
_CONTRADICTIONS: tuple[Contradiction[AlgorithmConfig], ...] = (
    Contradiction(
        ("whiten", "advantage"),
        lambda c: (
            c.whiten and (True not in c.advantage.whitening or any(term.scale != "none" for term in c.credit_terms))
        ),
        "algorithm.whiten would normalise twice: algorithm.advantage {c.advantage.kind} is already relative to its "
        "group; set whiten to false",
    ),
    Contradiction(
        ("whiten", "advantage"),
        lambda c: not c.whiten and False not in c.advantage.whitening,
        "algorithm.advantage {c.advantage.kind} is defined by its whitening: leave algorithm.whiten on",
    ),
    Contradiction(
        ("order", "advantage"),
        lambda c: (
            c.order != "together"
            and not (c.credit_terms and all(term.unit == "episode" and not term.parts for term in c.credit_terms))
        ),
        _ORDER + " with the episode's advantage, but algorithm.advantage {c.advantage.kind} gives others: set it to "
        "dr_grpo",
    ),
    Contradiction(
        ("order", "whiten"),
        lambda c: c.order != "together" and c.whiten,
        _ORDER + " and normalises its advantages itself: set algorithm.whiten to false",
    ),
    Contradiction(
        ("order", "epochs"),
        lambda c: c.order != "together" and c.epochs > 1,
        _ORDER + " only once: set algorithm.epochs to 1",
    ),
    Contradiction(
        ("order", "kl"),
        lambda c: c.order != "together" and c.kl.where == "reward",
        _ORDER + " with the episode's return: set algorithm.kl.where to loss or off",
    ),
    Contradiction(
        ("order", "distillation"),
        lambda c: c.order != "together" and c.has_teacher,
        _ORDER + " with the episode's advantage, but a teacher gives each token one: set algorithm.distillation to off",
    ),
    Contradiction(
        ("order", "loss"),
        lambda c: c.order != "together" and isinstance(c.loss, PPO) and c.loss.bounds_by_turn,
        _ORDER + ", without bounds by turn: give one clip_low and one clip_high, and no clip_decay",
    ),
    Contradiction(
        ("distillation", "filter", "dynamic_sampling"),
        lambda c: not c.distillation.reward and (c.filter != KeepAll() or c.dynamic_sampling.enabled),
        "algorithm.distillation.reward false lets the teacher alone teach, and it judges every group, but "
        "algorithm.filter and algorithm.dynamic_sampling drop groups whose rewards are equal: set algorithm.filter to "
        "none, and algorithm.dynamic_sampling.enabled and algorithm.filter.drop_identical to false",
    ),
    Contradiction(
        ("distillation", "advantage"),
        lambda c: not c.distillation.reward and c.needs_critic,
        "algorithm.distillation.reward false lets the teacher alone teach, but algorithm.advantage {c.advantage.kind} "
        "trains a critic on rewards: set it to an estimator without a critic, such as dr_grpo",
    ),
    Contradiction(
        ("filter_loss_scaling", "filter"),
        lambda c: c.filter_loss_scaling != "none" and c.filter.strategy == "none",
        "algorithm.filter_loss_scaling scales by the share a filter keeps: name a filter, or set it to none",
    ),
    Contradiction(
        ("kl", "advantage"),
        lambda c: (
            c.kl.where == "reward"
            and c.credit_terms
            and all(term.parts or term.unit == "criterion" for term in c.credit_terms)
        ),
        "algorithm.kl.where reward subtracts the penalty from the sum of rewards, but algorithm.advantage "
        "{c.advantage.kind} reads only parts of it: set kl.where to loss or off",
    ),
)
