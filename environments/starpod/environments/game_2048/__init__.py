"""game_2048-v1: slide a board of numbered tiles so that equal ones merge."""

from .board import ACTIONS
from .environment import Game2048, Game2048Options

__all__ = ["ACTIONS", "Game2048", "Game2048Options"]
