"""Configuration of the algorithm: presets by name, and the choices they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from starpod.client.spelling import nearest
from starpod.trainer.algorithms.sections import (
    CorrectionConfig,
    DynamicSamplingConfig,
    FilterConfig,
    GiGPOConfig,
    KLConfig,
    TurnClipConfig,
)
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.prompts.grammar import Block
from starpod.trainer.section import Section
from starpod.trainer.user_file import known_or_located, names_file

PRESETS: dict[str, dict[str, Any]] = {
    # RAGEN's vanilla StarPO: PPO over whole trajectories (arXiv 2504.20073).
    "starpo-ppo": {
        "advantage": "gae",
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
    },
    # The same with group-relative advantages instead of a critic (GRPO, arXiv 2402.03300).
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
    # arXiv 2602.16165: turns that go by a subgoal until they switch.
    "hiper": {
        "advantage": "hae",
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
        "bootstrap_truncated": True,
    },
    # SCoRe (arXiv 2409.12917): attempts by themselves, close to the first policy.
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
    # RAGEN-2 (arXiv 2604.06268): the groups that hold 90 % of the reward deviation.
    "ragen2": {
        "advantage": "gae",
        "dual_clip": 3.0,
        "filter": {"strategy": "top_p", "value": 0.9},
    },
}
"""Values of each preset; others are the defaults of `AlgorithmConfig`."""

DEFAULT_PRESET = "starpo-s"

WITH_CRITIC = ("gae", "bilevel_gae", "hae")
ESTIMATORS = (*WITH_CRITIC, *TERMS, "terms")
LOSSES = ("ppo", "gspo")
WHITENED = (*WITH_CRITIC, "reinforce_plus_plus", "reinforce_plus_plus_baseline")

# The field of a section that names its kind. Where a kind other than the preset's is asked for, what the preset says
# about its own has no meaning.
KINDS = {"kl": "where", "turn_clip": "kind", "filter": "strategy", "correction": "mode"}


class AlgorithmConfig(Section):
    """How episodes become gradients. What is given overrides the preset."""

    SHORTHAND: ClassVar[str] = "preset"

    preset: str = Field(default=DEFAULT_PRESET, description="Gives what is not set; see docs/algorithms.md#presets.")

    advantage: str = Field(
        default="gae",
        description="Estimator; gae, bilevel_gae and hae have a critic, terms is algorithm.terms.",
        examples=[*ESTIMATORS, "FILE.py:NAME"],
    )
    advantage_parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")
    terms: tuple[CreditTerm, ...] = Field(default=(), description="What the estimator `terms` adds up.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token (gae, reinforce_plus_plus).")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE's lambda per token.")
    turn_gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per turn (hae); 0.95 in bilevel_gae.")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per turn (bilevel_gae, hae).")
    segment_lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per segment; 0.95 in hae.")
    whiten: bool = Field(
        default=False,
        description="Normalises advantages over all tokens; on with a critic and in reinforce_plus_plus.",
    )
    baseline: Literal["token", "trajectory"] = Field(
        default="token", description="trajectory: the critic's value at the first token holds for all (gae)."
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="Continues truncated episodes by the critic's value.",
    )

    loss: str = Field(
        default="ppo", description="Ratios per token, or per episode (gspo).", examples=[*LOSSES, "FILE.py:NAME"]
    )
    loss_parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="Lower bound of ratios: 1 - clip_low.")
    clip_high: float = Field(default=0.28, ge=0, description="Upper bound of ratios: 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound of ratios where the advantage is negative; null: none."
    )
    turn_clip: TurnClipConfig = TurnClipConfig()
    loss_average: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        default="token-mean", description="Weights of tokens in the loss."
    )
    mask_truncated: bool = Field(
        default=False, description="Leaves replies that a limit on tokens cut out of the policy's loss."
    )
    kl: KLConfig = KLConfig()
    entropy_coefficient: float = Field(default=0.001, ge=0, description="Weight of the entropy bonus.")
    value_coefficient: float = Field(default=0.5, gt=0, description="Weight of the critic's loss.")
    value_clip: float | None = Field(
        default=None, gt=0, description="Bound of a value's move in an update; null: none."
    )

    filter: FilterConfig = FilterConfig()
    filter_loss_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="Scales the loss by the share of groups kept, or its root."
    )
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    gigpo: GiGPOConfig = GiGPOConfig()
    correction: CorrectionConfig = CorrectionConfig()

    epochs: int = Field(default=1, ge=1, description="Passes over a collection.")
    order: Literal["together", "reverse_turns", "forward_turns"] = Field(
        default="together",
        description="Updates on whole episodes, or a step on each turn by itself; see docs/methods.md#seeupo.",
    )
    mini_batch_size: int = Field(
        default=32, ge=1, description="Episodes of an optimiser step; a pass takes as many equal steps as come closest."
    )

    # --- what it needs -----------------------------------------------------------------------------------------------

    def steps(self, episodes: int) -> int:
        """Optimiser steps of a pass over so many episodes, of nearly equal size; at least one."""
        return max(1, (episodes + self.mini_batch_size // 2) // self.mini_batch_size)

    def scores_first(self, episodes: int) -> bool:
        """Whether an update of so many episodes needs log-probabilities before its first step.

        With a single step they are those of that step's own forward pass, and ratios are exactly 1. Whatever needs
        values, whole episodes or penalised rewards needs them earlier.
        """
        whole_episodes = self.couples_turns or (
            self.correction.mode in ("truncated", "masked") and self.correction.level == "sequence"
        )
        single = self.epochs * self.steps(episodes) == 1
        return not single or self.needs_critic or self.needs_reference or whole_episodes

    @property
    def couples_turns(self) -> bool:
        """Whether a token's loss depends on the present log-probabilities of its episode's other turns."""
        return self.loss != "ppo"

    @property
    def needs_critic(self) -> bool:
        """Whether values are learnt and used."""
        return self.advantage in WITH_CRITIC

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        """Terms of an estimator without a critic; empty with one."""
        terms = (*TERMS.get(self.advantage, self.terms),)
        if self.advantage == "gigpo":
            own = self.gigpo
            episode, step = (term.model_copy(update={"scale": "std" if own.normalise else "none"}) for term in terms)
            step = step.model_copy(update={"weight": own.weight, "gamma": own.gamma})
            return (episode, step) if own.weight else (episode,)
        if self.advantage == "reinforce_plus_plus":
            return tuple(term.model_copy(update={"gamma": self.gamma}) for term in terms)
        return terms

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy is scored."""
        return self.kl.where != "off"

    @property
    def needs_state_key(self) -> bool:
        """Whether environments must tell the digest of each state."""
        return any("state" in term.key for term in self.credit_terms)

    @property
    def blocks(self) -> frozenset[Block]:
        """Blocks of replies that are credited by themselves: their tokens must be known."""
        if self.advantage == "hae":
            return frozenset({"switch", "subgoal", "answer"})
        return frozenset(term.block for term in self.credit_terms if term.block is not None)

    @property
    def value_heads(self) -> int:
        """Values that the critic gives for each token."""
        return 3 if self.advantage == "hae" else 1

    def check_user_methods(self) -> None:
        """Raise ConfigError if the estimator or the loss of a user's file cannot be used."""
        if names_file(self.advantage) or names_file(self.loss):
            from starpod.trainer.algorithms.user_methods import check_user_methods  # which loads torch

            check_user_methods(self)

    # --- filling in and refusing -------------------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: Any) -> Any:
        # The preset's values must be known before the base class reads a word.
        if isinstance(values, str):
            values = {cls.SHORTHAND: values}
        if not isinstance(values, Mapping):
            return values
        if "policy_loss" in values:  # the key's name before the first version
            values = {"loss" if key == "policy_loss" else key: value for key, value in values.items()}
        preset = values.get("preset", DEFAULT_PRESET)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"no algorithm preset {preset!r}{_nearest_preset(str(preset))}")
        resolved = {**PRESETS[preset], **{key: _overlay(PRESETS[preset], key, values[key]) for key in values}}
        advantage, loss = resolved.get("advantage", "gae"), resolved.get("loss", "ppo")
        if advantage in WHITENED:
            resolved.setdefault("whiten", True)
        if advantage == "bilevel_gae":
            resolved.setdefault("turn_gamma", 0.95)
        if advantage == "hae":
            resolved.setdefault("segment_lam", 0.95)
        if loss == "gspo":
            # The ratio of a whole sequence moves far less than that of a token (arXiv 2507.18071, section 5.1).
            defaults = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None, "loss_average": "seq-mean-token-mean"}
            given = values if PRESETS[preset].get("loss") != "gspo" else resolved
            resolved |= {key: value for key, value in defaults.items() if key not in given}
        return resolved

    @field_validator("advantage")
    @classmethod
    def _find_estimator(cls, text: str) -> str:
        return known_or_located(text, ESTIMATORS, "estimator")

    @field_validator("loss")
    @classmethod
    def _find_loss(cls, text: str) -> str:
        return known_or_located(text, LOSSES, "loss")

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        for wrong, sentence in self._contradictions():
            if wrong:
                raise ValueError(sentence)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        advantage, critic = self.advantage, self.needs_critic
        without = f"algorithm.advantage {advantage}"
        fields = type(self).model_fields
        terms = self.credit_terms
        unscaled = names_file(advantage) or (advantage == "terms" and all(term.scale == "none" for term in terms))
        clip = {name: PRESETS[self.preset].get(name, fields[name].default) for name in ("clip_low", "clip_high")}
        return [
            *(
                (
                    bool(parameters) and not names_file(chosen),
                    f"algorithm.{key}_parameters belong to a function of a file, and algorithm.{key} is {chosen}: drop "
                    "them",
                )
                for key, chosen, parameters in (
                    ("advantage", advantage, self.advantage_parameters),
                    ("loss", self.loss, self.loss_parameters),
                )
            ),
            (
                self.whiten and advantage not in WHITENED and not unscaled,
                f"algorithm.whiten would normalise twice: {without} is already relative to its group; set whiten to "
                "false",
            ),
            (
                not self.whiten and advantage in WHITENED and not critic,
                f"{without} is defined by its whitening: leave algorithm.whiten on",
            ),
            (
                self.baseline == "trajectory" and advantage != "gae",
                f"algorithm.baseline trajectory is a critic's value: {without} does not use it; set advantage to gae",
            ),
            (
                self.baseline == "trajectory" and self.lam != 1,
                "algorithm.baseline trajectory uses one value per episode and no lambda: set algorithm.lam to 1",
            ),
            (
                self.value_clip is not None and not critic,
                f"algorithm.value_clip limits a critic, and {without} has none: set value_clip to null",
            ),
            (
                self.value_coefficient != fields["value_coefficient"].default and not critic,
                f"algorithm.value_coefficient weighs a critic's loss, and {without} has none: drop it",
            ),
            (
                self.bootstrap_truncated and not critic,
                f"algorithm.bootstrap_truncated asks a critic, and {without} has none: set it to false",
            ),
            (
                self.gamma != 1 and advantage not in ("gae", "bilevel_gae", "reinforce_plus_plus"),
                f"{without} does not discount by token: set algorithm.gamma to 1",
            ),
            (
                self.lam != 1 and advantage not in ("gae", "bilevel_gae"),
                f"{without} has no lambda per token: set algorithm.lam to 1",
            ),
            (
                (self.turn_gamma != 1 or self.turn_lam != 1) and advantage not in ("bilevel_gae", "hae"),
                f"algorithm.turn_gamma and turn_lam belong to bilevel_gae and hae: {without} does not use them; set "
                "both to 1",
            ),
            (
                self.segment_lam != 1 and advantage != "hae",
                f"algorithm.segment_lam belongs to hae: {without} has no segments; set it to 1",
            ),
            (
                self.loss != "ppo" and self.turn_clip.kind != "off",
                f"algorithm.turn_clip belongs to ppo, and algorithm.loss is {self.loss}: set turn_clip.kind to off, or "
                "the loss to ppo",
            ),
            (
                self.turn_clip.low is not None and (self.clip_low, self.clip_high) != (*clip.values(),),
                "algorithm.turn_clip.low and high take the place of clip_low and clip_high: give either",
            ),
            *self._contradictions_of_order(),
            (
                self.filter_loss_scaling != "none" and self.filter.strategy == "none",
                "algorithm.filter_loss_scaling scales by what a filter keeps: name a filter, or set it to none",
            ),
            (
                self.gigpo != GiGPOConfig() and advantage != "gigpo",
                f"algorithm.gigpo is set but {without} does not use it: set advantage to gigpo, or drop the section",
            ),
            (
                bool(self.terms) and advantage != "terms",
                f"algorithm.terms is set but {without} does not use it: set advantage to terms, or drop them",
            ),
            (
                advantage == "terms" and not self.terms,
                "algorithm.advantage terms adds up algorithm.terms, and there are none: give some, e.g. [{unit: turn, "
                "score: to_go, key: [state]}]",
            ),
            (
                self.kl.where == "reward" and bool(terms) and all(t.parts or t.unit == "criterion" for t in terms),
                f"algorithm.kl.where reward takes the penalty off the sum of rewards, and {without} reads parts of it "
                "alone: set kl.where to loss or off",
            ),
        ]

    def _contradictions_of_order(self) -> list[tuple[bool, str]]:
        turnwise = self.order != "together"
        whole = all(term.unit == "episode" and not term.parts for term in self.credit_terms)
        order = f"algorithm.order {self.order} takes a step on each turn"
        return [
            (
                turnwise and (not self.credit_terms or not whole),
                f"{order}, whose advantage is the episode's, and algorithm.advantage {self.advantage} is not: set it "
                "to dr_grpo",
            ),
            (
                turnwise and self.whiten,
                f"{order} and normalises its advantages itself: set algorithm.whiten to false",
            ),
            (turnwise and self.epochs > 1, f"{order}, once: set algorithm.epochs to 1"),
            (
                turnwise and self.kl.where == "reward",
                f"{order} with the episode's return: set algorithm.kl.where to loss or off",
            ),
            (
                turnwise and self.turn_clip.kind != "off",
                f"{order} and sees no other turn in it: set algorithm.turn_clip.kind to off",
            ),
        ]


def _nearest_preset(name: str) -> str:
    """Names that hold the given one, such as `grpo`, come before those that are spelt like it."""
    holding = [preset for preset in PRESETS if name.lower() in preset]
    return f"; did you mean {' or '.join(holding)}?" if holding and name else nearest(name, list(PRESETS))


def _overlay(preset: Mapping[str, Any], key: str, given: Any) -> Any:
    """What is given for a key, over what the preset says about it."""
    below = preset.get(key)
    if not isinstance(below, Mapping) or not isinstance(given, Mapping):
        return given
    kind = KINDS.get(key)
    if kind is not None and kind in given and given[kind] != below.get(kind):
        return given
    return {**below, **given}
