"""Bonus for using tools, in episodes that succeed alone (PyVision-RL, arXiv 2602.20739).

Under reinforcement learning looks that cost turns die out even where they help. A bonus for all of them would pay
endless looking; so it is paid where the outcome was right.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from starpod.trainer.data.episode import Turn
from starpod.trainer.section import Section


class ToolsConfig(Section):
    """Bonus for executed actions, paid at a speaker's last turn of a success. Off with 0."""

    bonus: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Paid for each action that counts.")
    actions: tuple[str, ...] = Field(
        default=(), description="Actions that count, in upper or lower case; empty: all that were executed."
    )


def score_tools(config: ToolsConfig, line: Sequence[Turn], success: bool | None) -> list[float]:
    """The bonus of each turn of a speaker in an attempt that is over: all of it is the last one's."""
    counted = {name.lower() for name in config.actions}
    executed = [action.lower() for turn in line for action, ran in zip(turn.actions, turn.ran, strict=False) if ran]
    used = sum(not counted or action in counted for action in executed) if success else 0
    return [0.0] * (len(line) - 1) + [config.bonus * used]
