"""The memory of a process that serves requests of all sizes for months: garbage, and what is given back."""

from __future__ import annotations

import ctypes
import gc

_LIBRARY = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_FREE_BYTES = 2**20


def settle() -> None:
    """Sets a process up to serve. For a whole process: programs call it, once everything is loaded.

    What is loaded stays, and is not looked at again by the collector. What comes is looked at every 50,000 objects, not
    every 700, since almost nothing that a call leaves behind is a cycle. A look at everything that is alive takes
    milliseconds, and comes after ten of those in turn: it frees cycles that environments make.

    glibc would take the largest message so far for usual, and keep as much free at the end of each thread's heap.
    """
    if mallopt := getattr(_LIBRARY, "mallopt", None):
        mallopt(_TRIM_THRESHOLD, 2 * _FREE_BYTES)
        mallopt(_MMAP_THRESHOLD, _FREE_BYTES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def give_back() -> None:
    """Gives memory that is not in use back to the system, where the C library is glibc."""
    if trim := getattr(_LIBRARY, "malloc_trim", None):
        trim(0)
