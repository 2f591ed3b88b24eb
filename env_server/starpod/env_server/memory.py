"""The memory of a process that serves requests of all sizes for months: garbage, and what is given back."""

from __future__ import annotations

import ctypes
import gc


def settle() -> None:
    """Sets a process up to serve. For a whole process: programs call it, once everything is loaded.

    What is loaded stays, and is not looked at again by the collector. What comes is looked at every 50,000 objects, not
    every 700, since almost nothing that a call leaves behind is a cycle. A look at everything that is alive takes
    milliseconds, and comes after ten of those in turn: it frees cycles that environments make.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def give_back() -> None:
    """Gives memory that is not in use back to the system, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
