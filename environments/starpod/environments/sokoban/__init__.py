"""sokoban-v1: push every box onto a target."""

from .environment import Sokoban, SokobanOptions

__all__ = ["Sokoban", "SokobanOptions"]
