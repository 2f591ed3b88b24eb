"""Penalties on how a policy holds on to its subgoals (HiPER, arXiv 2602.16165)."""

from __future__ import annotations

from pydantic import Field

from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.section import Section


class SubgoalsConfig(Section):
    """Penalties of replies with the blocks switch and subgoal. Off with 0."""

    keep_penalty: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="Divided by the episode's turns, on each turn that keeps its subgoal.",
    )
    consistency_penalty: float = Field(
        default=0.0, le=0, allow_inf_nan=False, description="Added to a turn that says KEEP and another subgoal."
    )


def is_inconsistent(turn: Turn, episode: Episode) -> bool:
    """Whether a turn keeps its subgoal and names another one than the turn before. turn: the episode's last."""
    before = episode.turns[-2] if len(episode.turns) > 1 else None
    if before is None or turn.switches or "subgoal" not in turn.blocks:
        return False
    return turn.blocks["subgoal"] != before.blocks.get("subgoal", turn.blocks["subgoal"])


def pay_keeping(config: SubgoalsConfig, episode: Episode) -> None:
    """Adds the part `keep` to the turns of an episode that is over: before, its number of turns is not known.

    The first turn begins a subgoal whatever it says.
    """
    if config.keep_penalty:
        for index, turn in enumerate(episode.turns):
            kept = index > 0 and not turn.switches
            turn.parts["keep"] = config.keep_penalty / len(episode.turns) if kept else 0.0
            turn.reward = sum(turn.parts.values())
