"""Waiting for what others bring about."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until the condition holds. Raise TimeoutError if it does not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
