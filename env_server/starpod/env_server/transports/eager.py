"""Runs a coroutine at once; only one that has to wait becomes a task.

Most calls finish without waiting, and a task costs more than many of them. (Python 3.12 has eager tasks; this does the
same on 3.11.)
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from starpod.env_server.limits import Tenant, loop_time

R = TypeVar("R")


def run_eagerly(coroutine: Coroutine[Any, Any, R], tenant: Tenant) -> tuple[R, None] | tuple[None, asyncio.Task[R]]:
    """Either the result, or the task that goes on with it. Exceptions before the first wait pass through.

    What the coroutine takes of the event loop after its first wait counts as the tenant's. The time before is the
    caller's to count: of many calls together, since to read the clock of a thread is dear.
    """
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
                    started = loop_time()
                    yielded = coroutine.throw(error)
                else:
                    started = loop_time()
                    yielded = coroutine.send(sent)
            except StopIteration as finished:
                result: R = finished.value
                return result
            finally:
                tenant.spent += loop_time() - started

    async def go_on() -> R:
        return await resume()

    return None, asyncio.get_running_loop().create_task(go_on())
