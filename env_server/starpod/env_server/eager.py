"""Runs a coroutine at once; only one that has to wait becomes a task.

Most calls finish without waiting, and a task costs more than many of them. (Python 3.12 has eager tasks; this does the
same on 3.11.)
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

R = TypeVar("R")


def run_eagerly(coroutine: Coroutine[Any, Any, R]) -> tuple[R, None] | tuple[None, asyncio.Task[R]]:
    """Either the result, or the task that goes on with it. Exceptions before the first wait pass through."""
    try:
        waiting_for = coroutine.send(None)
    except StopIteration as finished:
        return finished.value, None

    @types.coroutine
    def resume() -> Generator[Any, Any, R]:
        yielded = waiting_for
        while True:
            try:
                try:
                    sent = yield yielded
                except BaseException as error:
                    yielded = coroutine.throw(error)
                else:
                    yielded = coroutine.send(sent)
            except StopIteration as finished:
                result: R = finished.value
                return result

    async def go_on() -> R:
        return await resume()

    return None, asyncio.get_running_loop().create_task(go_on())
