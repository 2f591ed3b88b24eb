"""Rewards for true statements about the state, in thoughts and in the blocks `description` and `prediction`.

A package that knows the environment checks the statements. It registers shaping functions named `reasoning`,
`description` and `prediction` in the entry-point group `starpod.rewards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field, model_validator

from starpod.trainer.data.episode import Episode
from starpod.trainer.section import Section

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
        description="Paid for a turn of true claims, taken for one of false ones; keep it small.",
    )
    claims: int = Field(default=2, ge=1, description="True topics that earn the whole weight.")


class RelationsConfig(Section):
    """Payment for the blocks `description` and `prediction`, in frozen_lake and sokoban. Weights of 0 turn it off."""

    description: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Paid for where things are, times the F1 of the block."
    )
    prediction: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="The same for where things are after the turn."
    )
    intended: bool = Field(
        default=False,
        description="A prediction is of where the actions lead on ice that does not slip: nobody can foresee luck.",
    )
    repetition: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="The score of a block, instead of its F1, whose text is among the five that a collection repeats "
        "most and is right by less than 0.7; 0: off.",
    )

    @model_validator(mode="after")
    def _is_paid(self) -> RelationsConfig:
        if self.intended and not self.prediction:
            raise ValueError(
                "rewards.relations.intended says what predictions are compared with, and nothing is paid for them: "
                "give rewards.relations.prediction, or drop it"
            )
        if self.repetition and not (self.description or self.prediction):
            raise ValueError(
                "rewards.relations.repetition is a score of blocks that nothing is paid for: give "
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
