"""What goes wrong with models before anything is trained."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be used as configured. The message says what to change."""
