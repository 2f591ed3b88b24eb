"""Bonus for the use of tools in successful episodes (PyVision-RL, arXiv 2602.20739).

RL unlearns tool calls because they cost turns, even if they help. A bonus for every call would reward endless calls, so
it is paid only in case of success.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from starpod.trainer.configuration.section import Section
from starpod.trainer.data.episode import Turn


class ToolsConfig(Section):
    """Bonus for executed actions, paid at a speaker's last turn if the episode succeeds. 0 turns it off."""

    bonus: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Reward of each action that counts.")
    actions: tuple[str, ...] = Field(
        default=(),
        description="Actions that count, regardless of case; of a tool call such as `search {...}`, the tool's name. "
        "Empty: all executed actions.",
    )


def score_tools(config: ToolsConfig, line: Sequence[Turn], success: bool | None) -> list[float]:
    """Return the bonus of each turn of a speaker in a finished attempt. The last turn gets all of it.

    Args:
        config: Bonus per action, and the actions that count; all if none are named.
        line: The speaker's turns in the attempt, at least one.
        success: Whether the attempt succeeded. Otherwise, and for None, the bonus is 0.
    """
    names = {name.lower() for name in config.actions}
    outcomes = [pair for turn in line for pair in zip(turn.actions, turn.outcomes, strict=False)]
    actions = [action.partition(" {")[0].lower() for action, outcome in outcomes if outcome.executed]
    count = sum(not names or action in names for action in actions) if success else 0
    return [0.0] * (len(line) - 1) + [config.bonus * count]
