"""sudoku-v1: fill the grid so that no row, column or box contains a digit twice."""

from .environment import Sudoku
from .options import SudokuOptions

__all__ = ["Sudoku", "SudokuOptions"]
