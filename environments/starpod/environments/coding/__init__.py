"""coding-v1: write a Python function that passes hidden tests."""

from .environment import Coding, CodingOptions

__all__ = ["Coding", "CodingOptions"]
