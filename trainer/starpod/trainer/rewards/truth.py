"""Rewards for true statements about the state, in thoughts and in the blocks `description` and `prediction`.

A package that knows the environment checks the statements. It registers shaping functions named `reasoning`,
`description` and `prediction` in the entry-point group `starpod.rewards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import Section
from starpod.trainer.data.episode import Episode

_REPEATED = 5
"""Maximum number of texts per collection that count as repeated, the most frequent ones first."""
_MOSTLY_RIGHT = 0.7
"""A text with at least this score may be repeated without penalty."""


class ReasoningConfig(Section):
    """Payment for true claims in a thought, in frozen_lake and sokoban. Weight 0 turns it off."""

    weight: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Factor of the score of a thought's claims, from -1 (all false) to 1; keep it small.",
    )
    claims: int = Field(
        default=2, ge=1, description="Number of topics with true claims for which the whole weight is paid."
    )


class RelationsConfig(Section):
    """Payment for the blocks `description` and `prediction`, in frozen_lake and sokoban. Weights of 0 turn it off."""

    description: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Factor of the F1 of `description`: positions of things before the turn.",
    )
    prediction: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Factor of the F1 of `prediction`: positions of things after the turn.",
    )
    intended: bool = Field(
        default=False,
        description="Compares predictions with the result without slips on ice, because slips are unpredictable.",
    )
    repetition: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="Replaces the F1 of a block if it is below 0.7 and the text is among the five most repeated in "
        "the collection; 0: off.",
    )

    @model_validator(mode="after")
    def _is_paid(self) -> RelationsConfig:
        if self.intended and not self.prediction:
            raise ValueError(
                "rewards.relations.intended changes how predictions are scored, but nothing is paid for them: set "
                "rewards.relations.prediction, or drop it"
            )
        if self.repetition and not (self.description or self.prediction):
            raise ValueError(
                "rewards.relations.repetition is a score of blocks, but nothing is paid for them: set "
                "rewards.relations.description or prediction, or drop it"
            )
        return self


def punish_repetition(config: RelationsConfig, episodes: Sequence[Episode]) -> None:
    """Give blocks with an often repeated text and a low F1 score the score `config.repetition` instead.

    These are blocks whose text is one of the `_REPEATED` most frequent ones, and whose score is below `_MOSTLY_RIGHT`.
    A constant phrase is sometimes right, and it has fooled LLM judges (arXiv 2510.16907).
    """
    for block in ("description", "prediction") if config.repetition else ():
        weight = getattr(config, block)
        turns = [turn for each in episodes for turn in each.own_turns if block in turn.parts and block in turn.blocks]
        counts = Counter(turn.blocks[block] for turn in turns)
        repeated_texts = {text for text, count in counts.most_common(_REPEATED) if count > 1}
        for turn in turns:
            if turn.blocks[block] in repeated_texts and turn.parts[block] < _MOSTLY_RIGHT * weight:
                turn.pay({block: weight * config.repetition})
