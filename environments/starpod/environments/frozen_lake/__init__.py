"""frozen_lake-v1: a walk over slippery ice to the goal."""

from .environment import FrozenLake, FrozenLakeOptions
from .lake import LakeSymbols
from .maps import ACTIONS

__all__ = ["ACTIONS", "FrozenLake", "FrozenLakeOptions", "LakeSymbols"]
