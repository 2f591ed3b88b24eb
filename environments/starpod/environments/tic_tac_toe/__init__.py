"""tic_tac_toe-v1: three in a row, against an opponent or for both sides."""

from .environment import TicTacToe, TicTacToeOptions

__all__ = ["TicTacToe", "TicTacToeOptions"]
