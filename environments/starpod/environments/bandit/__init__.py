"""bandit-v1: a two-armed bandit whose arms have telling names."""

from .environment import PAIRS, Bandit, BanditOptions

__all__ = ["PAIRS", "Bandit", "BanditOptions"]
