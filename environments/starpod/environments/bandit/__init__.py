"""bandit-v1: a two-armed bandit whose arms' names hint at their payouts."""

from .environment import PAIRS, Bandit, BanditOptions

__all__ = ["PAIRS", "Bandit", "BanditOptions"]
