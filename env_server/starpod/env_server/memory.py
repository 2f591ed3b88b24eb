"""The memory of a process that serves requests of all sizes for months: garbage, and what is given back."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 2**20


def settle() -> None:
    """Sets a process up to serve. For a whole process: programs call it, once everything is loaded.

    What is loaded stays, and is not looked at again by the collector. What comes is looked at every 50,000 objects, not
    every 700, since almost nothing that a call leaves behind is a cycle. A look at everything that is alive takes
    milliseconds, and comes after ten of those in turn: it frees cycles that environments make.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    if (libc := _libc()) is not None:
        # Large buffers always have pages of their own, given back as soon as they are freed. By default glibc learns
        # from the first large one to keep the next ones.
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def give_back() -> None:
    """Gives memory that is not in use back to the system, where its C library can."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        _ = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError, TypeError):
        return None  # not glibc
    return libc
