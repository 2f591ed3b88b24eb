"""Penalties for keeping subgoals too long or inconsistently (HiPER, arXiv 2602.16165)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from starpod.trainer.configuration.section import Section
from starpod.trainer.data.episode import Turn
from starpod.trainer.rewards.view import TurnView


class SubgoalsConfig(Section):
    """Penalties for replies with the blocks `switch` and `subgoal`. 0 turns a penalty off."""

    keep_penalty: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="Penalty of an attempt that never changes its subgoal. Each turn that keeps the subgoal gets "
        "this value divided by the number of the agent's turns; 0: off.",
    )
    consistency_penalty: float = Field(
        default=0.0, le=0, allow_inf_nan=False, description="Added to a turn that says KEEP but names another subgoal."
    )


def is_inconsistent(view: TurnView) -> bool:
    """Return whether a turn claims to keep its subgoal but names a different one from the speaker's previous turn."""
    turn, previous = view.turn, view.previous
    if previous is None or turn.switches or "subgoal" not in turn.blocks:
        return False
    return turn.blocks["subgoal"] != previous.blocks.get("subgoal", turn.blocks["subgoal"])


def score_keeping(config: SubgoalsConfig, line: Sequence[Turn]) -> list[float]:
    """Return the penalty of each turn of a speaker in a finished attempt.

    A turn that keeps its subgoal gets the configured penalty divided by the number of turns. The first turn always
    begins a subgoal, so it has no penalty.
    """
    share = config.keep_penalty / len(line)
    return [share if index and not turn.switches else 0.0 for index, turn in enumerate(line)]
