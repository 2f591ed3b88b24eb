"""Configuration of the algorithm: named presets, and the settings that they combine."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from starpod.client.spelling import nearest
from starpod.trainer.algorithms.estimators import (
    ESTIMATORS,
    GAE,
    HAE,
    BilevelGAE,
    CriticEstimator,
    Estimator,
    EstimatorSettings,
    GiGPO,
    ReinforcePlusPlus,
    Terms,
    TokenEstimator,
    UserEstimator,
)
from starpod.trainer.algorithms.objectives import (
    CISPO,
    DPPO,
    GSPO,
    OBJECTIVES,
    PPO,
    ClippedObjective,
    LossInputs,
    Objective,
    UserObjective,
)
from starpod.trainer.algorithms.sections import (
    CorrectionConfig,
    DynamicSamplingConfig,
    FilterConfig,
    KLConfig,
    TurnClipConfig,
)
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.configuration.section import Section
from starpod.trainer.configuration.user_file import known_or_located, names_file
from starpod.trainer.prompts.grammar import Block

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.algorithms.losses import PolicyLoss

PRESETS: dict[str, dict[str, Any]] = {
    # RAGEN's vanilla StarPO: PPO over whole trajectories (arXiv 2504.20073).
    "starpo-ppo": {
        "advantage": "gae",
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
    },
    # StarPO with group-relative advantages instead of a critic (GRPO, arXiv 2402.03300).
    "starpo-grpo": {
        "advantage": "grpo",
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
        "loss_average": "seq-mean-token-mean",
    },
    # Uncertain start states only, no KL, clip-higher (arXiv 2504.20073).
    "starpo-s": {
        "advantage": "gae",
        "dual_clip": 3.0,
        "filter": {"strategy": "top_fraction", "value": 0.25},
    },
    # arXiv 2503.14476.
    "dapo": {
        "advantage": "grpo",
        "entropy_coefficient": 0.0,
        "dynamic_sampling": {"enabled": True, "max_rounds": 3},
    },
    # arXiv 2503.20783.
    "dr-grpo": {
        "advantage": "dr_grpo",
        "clip_high": 0.2,
        "entropy_coefficient": 0.0,
        "loss_average": "seq-mean-token-sum-norm",
    },
    # arXiv 2502.01600: ratios to the sampler, within [1/1.1, 1.1].
    "loop": {
        "advantage": "loop",
        "clip_low": 1 - 1 / 1.1,
        "clip_high": 0.1,
        "entropy_coefficient": 0.0,
        "loss_average": "seq-mean-token-mean",
        "correction": {"mode": "bypass"},
        "epochs": 2,
    },
    # arXiv 2505.10978.
    "gigpo": {
        "advantage": "gigpo",
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
        "gigpo": {"weight": 1.0, "gamma": 0.95},
    },
    # arXiv 2602.16165: turns follow a subgoal until they switch.
    "hiper": {
        "advantage": "hae",
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
        "bootstrap_truncated": True,
    },
    # SCoRe (arXiv 2409.12917): separate attempts, close to the first policy.
    "score": {
        "advantage": "attempts",
        "clip_high": 0.2,
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
        "entropy_coefficient": 0.0,
    },
    # PyVision-RL (arXiv 2602.20739): Dr. GRPO on the groups that differ most.
    "pyvision": {
        "advantage": "dr_grpo",
        "clip_high": 0.2,
        "entropy_coefficient": 0.0,
        "loss_average": "seq-mean-token-sum-norm",
        "filter": {"strategy": "top_fraction", "value": 0.5},
    },
    # arXiv 2602.06554.
    "seeupo": {
        "advantage": "dr_grpo",
        "order": "reverse_turns",
        "loss": "gspo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "loss_average": "seq-mean-token-mean",
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.002},
        "entropy_coefficient": 0.0,
    },
    # RAGEN-2 (arXiv 2604.06268): the groups with 90 % of the reward deviation.
    "ragen2": {
        "advantage": "gae",
        "dual_clip": 3.0,
        "filter": {"strategy": "top_p", "value": 0.9},
    },
}
"""Values of each preset. All other values are the defaults of `AlgorithmConfig`."""

DEFAULT_PRESET = "starpo-s"

METHODS: tuple[type[Estimator | Objective], ...] = (
    CriticEstimator,
    TokenEstimator,
    GAE,
    BilevelGAE,
    HAE,
    ReinforcePlusPlus,
    GiGPO,
    Terms,
    UserEstimator,
    ClippedObjective,
    PPO,
    GSPO,
    CISPO,
    DPPO,
    UserObjective,
)
"""Estimators and losses. The section `algorithm` has their keys in addition to those of `AlgorithmConfig`."""
OWNERS = {
    key: [kind for kind in METHODS if key in kind.model_fields] for method in METHODS for key in method.model_fields
}
"""Maps each key to the methods that have it."""

# Field that names the kind of each of these sections. If another kind than the preset's is given, the preset's other
# values for that section are dropped.
KINDS = {"kl": "where", "turn_clip": "kind", "filter": "strategy", "correction": "mode"}


class AlgorithmConfig(Section):
    """Section `algorithm`: how gradients are computed from episodes. Keys that are set override those of the preset."""

    SHORTHAND: ClassVar[str] = "preset"

    preset: str = Field(
        default=DEFAULT_PRESET, description="Values of keys that are not set; see docs/algorithms.md#presets."
    )

    advantage: str = Field(
        default="gae",
        description="Estimator. gae, bilevel_gae and hae have a critic; terms uses algorithm.terms.",
        examples=[*ESTIMATORS, "FILE.py:NAME"],
    )
    whiten: bool = Field(
        default=False,
        description="Normalises advantages over all tokens; default: on with a critic and in reinforce_plus_plus.",
    )

    loss: str = Field(
        default="ppo",
        description="Policy loss; its ratios are per token, or per episode in gspo; see "
        "docs/algorithms.md#policy-loss.",
        examples=[*OBJECTIVES, "FILE.py:NAME"],
    )
    loss_average: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        default="token-mean",
        description="Average over tokens in the loss; by default seq-mean-token-mean in gspo, "
        "seq-mean-token-sum-norm in dppo.",
    )
    mask_truncated: bool = Field(
        default=False, description="Excludes replies that a token limit cut from the policy's loss."
    )
    kl: KLConfig = KLConfig()
    entropy_coefficient: float = Field(default=0.001, ge=0, description="Weight of the entropy bonus.")

    filter: FilterConfig = FilterConfig()
    filter_loss_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="linear: scales the loss by the share of groups kept; sqrt: by its square root."
    )
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    correction: CorrectionConfig = CorrectionConfig()

    epochs: int = Field(default=1, ge=1, description="Passes over a collection.")
    order: Literal["together", "reverse_turns", "forward_turns"] = Field(
        default="together",
        description="together: updates on whole episodes; others: a step on each turn; see docs/methods.md#seeupo.",
    )
    mini_batch_size: int = Field(
        default=32,
        ge=1,
        description="Episodes per optimiser step; a pass is split into equal steps of about this size.",
    )

    _estimator: Estimator = PrivateAttr()
    _objective: Objective = PrivateAttr()

    @property
    def estimator(self) -> Estimator:
        """The estimator that the key `advantage` selects, with its settings."""
        return self._estimator

    @property
    def objective(self) -> Objective:
        """The loss that the key `loss` selects, with its settings."""
        return self._objective

    # --- requirements ------------------------------------------------------------------------------------------------

    def steps(self, episodes: int) -> int:
        """Return the number of optimiser steps, of nearly equal size, in a pass over the episodes; at least one."""
        return max(1, (episodes + self.mini_batch_size // 2) // self.mini_batch_size)

    def scores_first(self, episodes: int) -> bool:
        """Return whether an update of this number of episodes needs a scoring pass before its first step.

        An update with a single step takes the old log-probabilities from that step's forward pass, so that all ratios
        are exactly 1. Correction `bypass` uses the sampler's. A critic, a reference policy, and losses over whole
        episodes need the scoring pass.
        """
        whole_episodes = self.objective.couples_turns or self.correction.level == "sequence"
        is_single_step = self.epochs * self.steps(episodes) == 1
        skips_scoring = self.correction.mode == "bypass" or (is_single_step and not whole_episodes)
        return self.needs_critic or self.needs_reference or not skips_scoring

    @property
    def critic(self) -> CriticEstimator | None:
        """The estimator, if it has a critic; else None."""
        return self._estimator if isinstance(self._estimator, CriticEstimator) else None

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator has a critic."""
        return self.critic is not None

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        """Terms of an estimator without a critic; empty for one with a critic or from a user's file."""
        return self.estimator.terms_of((*TERMS.get(self.advantage, ()),))

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy is needed."""
        return self.kl.where != "off"

    @property
    def needs_state_key(self) -> bool:
        """Whether environments must report the digest of each state."""
        return any("state" in term.key for term in self.credit_terms)

    @property
    def may_read_state_key(self) -> bool:
        """Whether the estimator comes from a user's file. It then gets state keys if the environment reports them."""
        return names_file(self.advantage)

    @property
    def blocks(self) -> frozenset[Block]:
        """Blocks of replies that get separate credit. Turns must record which tokens belong to these blocks."""
        if first := self.estimator.first_blocks:
            return frozenset({*first, "answer"})
        return frozenset(term.block for term in self.credit_terms if term.block is not None)

    @property
    def value_heads(self) -> int:
        """Number of values that the critic returns per token."""
        return max(1, self.estimator.heads)

    @property
    def estimator_settings(self) -> EstimatorSettings:
        """Keys that an estimator needs in addition to its own."""
        return EstimatorSettings(self.advantage, self.credit_terms, self.whiten)

    def policy_loss(
        self,
        logprobs_BT: Tensor,
        old_logprobs_BT: Tensor,
        advantages_BT: Tensor,
        *,
        mask_BT: Tensor,
        turns_BT: Tensor,
    ) -> PolicyLoss:
        """Return the loss of each token; see LossInputs. Gradients only flow through logprobs_BT."""
        inputs = LossInputs(logprobs_BT, old_logprobs_BT.detach(), advantages_BT.detach(), mask_BT, turns_BT)
        return self.objective.per_token(self.loss, inputs)

    # --- validation --------------------------------------------------------------------------------------------------

    @classmethod
    def all_fields(cls) -> dict[str, FieldInfo]:
        return {**{key: kinds[0].model_fields[key] for key, kinds in OWNERS.items()}, **cls.model_fields}

    @model_validator(mode="wrap")
    @classmethod
    def _with_methods(cls, values: Any, handler: ModelWrapValidatorHandler[AlgorithmConfig]) -> AlgorithmConfig:
        if isinstance(values, str):
            values = {cls.SHORTHAND: values}
        if not isinstance(values, Mapping):
            return handler(values)
        if "policy_loss" in values:
            raise ValueError("algorithm.policy_loss is called algorithm.loss now: rename the key")
        preset = values.get("preset", DEFAULT_PRESET)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"no algorithm preset {preset!r}{_nearest_preset(str(preset))}")
        preset_values = {"advantage": "gae", "loss": "ppo", **PRESETS[preset]}
        methods = {key: values.get(key, preset_values[key]) for key in ("advantage", "loss")}
        for key, known, noun in (("advantage", ESTIMATORS, "estimator"), ("loss", OBJECTIVES, "loss")):
            methods[key] = known_or_located(str(methods[key]), [*known], noun)
        kinds = _chosen(methods)
        if methods["loss"] != preset_values["loss"]:  # the preset's bounds only fit its own ratios
            bounds = {*ClippedObjective.model_fields, *PPO.model_fields, "loss_average"}
            preset_values = {key: value for key, value in preset_values.items() if key not in bounds}
        preset_values = {**kinds[1].defaults, **preset_values}
        resolved = {**preset_values, **{key: _overlay(preset_values, key, values[key]) for key in values}, **methods}
        sections = [{key: value for key, value in resolved.items() if key in kind.model_fields} for kind in kinds]
        common = {key: value for key, value in resolved.items() if key not in sections[0] and key not in sections[1]}
        for key in sorted(OWNERS.keys() & common.keys()):
            if key in values:
                raise ValueError(_belongs(key, resolved))
            del common[key]
        estimator, objective = kinds[0].model_validate(sections[0]), kinds[1].model_validate(sections[1])
        config = handler({"whiten": estimator.whitening[0], **common})
        config._estimator, config._objective = estimator, objective
        for wrong, sentence in config._contradictions():
            if wrong:
                raise ValueError(sentence)
        return config

    @model_serializer(mode="wrap")
    def _with_keys_of_methods(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        methods = [method.model_dump(mode=info.mode) for method in (self.estimator, self.objective)]
        return {**handler(self), **methods[0], **methods[1]}

    def _contradictions(self) -> list[tuple[bool, str]]:
        method = f"algorithm.advantage {self.advantage}"
        terms = self.credit_terms
        clips = ("clip_low", "clip_high")
        turn_clip = self.objective.turn_clip if isinstance(self.objective, PPO) else TurnClipConfig()
        return [
            (
                self.whiten and (True not in self.estimator.whitening or any(term.scale != "none" for term in terms)),
                f"algorithm.whiten would normalise twice: {method} is already relative to its group; set whiten to "
                "false",
            ),
            (
                not self.whiten and False not in self.estimator.whitening,
                f"{method} is defined by its whitening: leave algorithm.whiten on",
            ),
            (
                turn_clip.low is not None
                and any(
                    getattr(self.objective, name) != PRESETS[self.preset].get(name, PPO.model_fields[name].default)
                    for name in clips
                ),
                "algorithm.turn_clip.low and high replace clip_low and clip_high: give one of the two pairs",
            ),
            *self._contradictions_of_order(turn_clip),
            (
                self.filter_loss_scaling != "none" and self.filter.strategy == "none",
                "algorithm.filter_loss_scaling scales by the share a filter keeps: name a filter, or set it to none",
            ),
            (
                self.kl.where == "reward" and bool(terms) and all(t.parts or t.unit == "criterion" for t in terms),
                f"algorithm.kl.where reward subtracts the penalty from the sum of rewards, but {method} reads only "
                "parts of it: set kl.where to loss or off",
            ),
        ]

    def _contradictions_of_order(self, turn_clip: TurnClipConfig) -> list[tuple[bool, str]]:
        turnwise = self.order != "together"
        whole_episodes = all(term.unit == "episode" and not term.parts for term in self.credit_terms)
        order = f"algorithm.order {self.order} takes a step on each turn"
        return [
            (
                turnwise and (not self.credit_terms or not whole_episodes),
                f"{order} with the episode's advantage, but algorithm.advantage {self.advantage} gives others: set "
                "it to dr_grpo",
            ),
            (
                turnwise and self.whiten,
                f"{order} and normalises its advantages itself: set algorithm.whiten to false",
            ),
            (turnwise and self.epochs > 1, f"{order} only once: set algorithm.epochs to 1"),
            (
                turnwise and self.kl.where == "reward",
                f"{order} with the episode's return: set algorithm.kl.where to loss or off",
            ),
            (
                turnwise and turn_clip.kind != "off",
                f"{order}, without bounds by turn: set algorithm.turn_clip.kind to off",
            ),
        ]


def _chosen(values: Mapping[str, Any]) -> tuple[type[Estimator], type[Objective]]:
    """Return the classes of the estimator and the loss that the section `algorithm` names in these values."""
    return ESTIMATORS.get(str(values["advantage"]), UserEstimator), OBJECTIVES.get(str(values["loss"]), UserObjective)


def _belongs(key: str, values: Mapping[str, Any]) -> str:
    """Return the error message for a key of a method that is not chosen."""
    name = "advantage" if issubclass(OWNERS[key][0], Estimator) else "loss"
    methods: Mapping[str, type[Section]] = ESTIMATORS if name == "advantage" else OBJECTIVES
    owners = [method for method, kind in methods.items() if key in kind.model_fields] or ["FILE.py:NAME"]
    return (
        f"algorithm.{key} belongs to {', '.join(owners)}, and algorithm.{name} is {values[name]}: drop it, or set "
        f"algorithm.{name} to {owners[0]}"
    )


def without_unused_keys(values: Mapping[str, Any], kept_keys: Container[str]) -> dict[str, Any]:
    """Return the values of `algorithm` without the keys of methods that are not chosen. kept_keys: exceptions."""
    methods = _chosen({"advantage": "gae", "loss": "ppo", **PRESETS.get(str(values.get("preset")), {}), **values})
    unused_keys = {
        key for key in OWNERS if key not in kept_keys and not any(key in kind.model_fields for kind in methods)
    }
    return {key: value for key, value in values.items() if key not in unused_keys}


def _nearest_preset(name: str) -> str:
    """Return a suggestion of presets whose names contain the given one, such as `grpo`, or are spelt similarly."""
    presets = [preset for preset in PRESETS if name.lower() in preset]
    return f"; did you mean {' or '.join(presets)}?" if presets and name else nearest(name, list(PRESETS))


def _overlay(preset: Mapping[str, Any], key: str, value: Any) -> Any:
    """Return the value given for a key. If it and the preset's are mappings of the same kind, they are merged."""
    preset_value = preset.get(key)
    if not isinstance(preset_value, Mapping) or not isinstance(value, Mapping):
        return value
    kind = KINDS.get(key)
    if kind is not None and kind in value and value[kind] != preset_value.get(kind):
        return value
    return {**preset_value, **value}
