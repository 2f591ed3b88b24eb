"""sokoban-v1: push every box onto a target."""

from .environment import Sokoban
from .options import SokobanOptions

__all__ = ["Sokoban", "SokobanOptions"]
