"""Memory management of a long-running server: garbage collection, and returning free memory to the system."""

from __future__ import annotations

import ctypes
import gc

_LIBRARY = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_FREE_BYTES = 2**20


def settle() -> None:
    """Tune garbage collection and malloc for serving. Programs call it once, after everything is loaded.

    Objects loaded so far are excluded from collection. Later ones are collected every 50,000 objects instead of 700,
    because calls leave almost no cycles. Environments do make cycles, which full collections free. A full collection
    takes milliseconds and runs after ten collections of the middle generation.

    malloc's thresholds are fixed. Otherwise glibc would adapt them to the largest message so far, and keep that much
    free memory at the end of each thread's heap.
    """
    if mallopt := getattr(_LIBRARY, "mallopt", None):
        mallopt(_TRIM_THRESHOLD, 2 * _FREE_BYTES)
        mallopt(_MMAP_THRESHOLD, _FREE_BYTES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def give_back() -> None:
    """Return unused memory to the system, if the C library is glibc."""
    if malloc_trim := getattr(_LIBRARY, "malloc_trim", None):
        malloc_trim(0)
