"""word_problems-v1: grade-school arithmetic in words, generated with its steps."""

from .environment import WordProblems, WordProblemsOptions

__all__ = ["WordProblems", "WordProblemsOptions"]
