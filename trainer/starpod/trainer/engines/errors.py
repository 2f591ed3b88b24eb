"""What goes wrong with an engine, apart from a wrong call."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine cannot be had, or it broke. The message says which, and what to do about it."""
