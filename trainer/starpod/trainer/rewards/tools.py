"""Bonus for using tools, in episodes that succeed alone (PyVision-RL, arXiv 2602.20739).

Under reinforcement learning looks that cost turns die out even where they help. A bonus for all of them would pay
endless looking; so it is paid where the outcome was right.
"""

from __future__ import annotations

from pydantic import Field

from starpod.trainer.data.episode import Episode
from starpod.trainer.section import Section


class ToolsConfig(Section):
    """Bonus for executed actions, paid at the end of a success. Off with 0."""

    bonus: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Paid for each action that counts.")
    actions: tuple[str, ...] = Field(
        default=(), description="Actions that count, in upper or lower case; empty: all that were executed."
    )


def pay_tools(config: ToolsConfig, episode: Episode) -> None:
    """Adds the part `tools` to the turns of an episode that is over: the bonus at its last turn, else 0."""
    if not config.bonus or not episode.turns:
        return
    counted = {name.lower() for name in config.actions}
    used = sum(
        not counted or action.lower() in counted for turn in episode.turns for action in turn.actions[: turn.executed]
    )
    for turn in episode.turns:
        last = turn is episode.turns[-1]
        turn.parts["tools"] = config.bonus * used if last and episode.success else 0.0
        turn.reward = sum(turn.parts.values())
