"""Python's collector of garbage, for programs that hold thousands of sessions."""

from __future__ import annotations

import gc


def look_rarely() -> None:
    """What is loaded stays and is not looked at again; what comes is looked at every 50,000 objects, not every 700.

    A look at everything takes milliseconds, and would count as the server's. For a whole process: programs call it,
    libraries don't.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
