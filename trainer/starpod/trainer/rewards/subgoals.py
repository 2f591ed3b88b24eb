"""Penalties on how a policy holds on to its subgoals (HiPER, arXiv 2602.16165)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from starpod.trainer.data.episode import Turn
from starpod.trainer.rewards.view import TurnView
from starpod.trainer.section import Section


class SubgoalsConfig(Section):
    """Penalties of replies with the blocks switch and subgoal. Off with 0."""

    keep_penalty: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="Divided by the speaker's turns in the attempt, on each turn that keeps its subgoal.",
    )
    consistency_penalty: float = Field(
        default=0.0, le=0, allow_inf_nan=False, description="Added to a turn that says KEEP and another subgoal."
    )


def is_inconsistent(view: TurnView) -> bool:
    """Whether a turn keeps its subgoal and names another one than the speaker's turn before."""
    turn, before = view.turn, view.previous
    if before is None or turn.switches or "subgoal" not in turn.blocks:
        return False
    return turn.blocks["subgoal"] != before.blocks.get("subgoal", turn.blocks["subgoal"])


def score_keeping(config: SubgoalsConfig, line: Sequence[Turn]) -> list[float]:
    """The penalty of each turn of a speaker in an attempt that is over: before, their number is not known.

    The first turn begins a subgoal whatever it says.
    """
    share = config.keep_penalty / len(line)
    return [share if index and not turn.switches else 0.0 for index, turn in enumerate(line)]
