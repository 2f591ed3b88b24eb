"""Run a coroutine at once, and make a task of it only if it has to wait.

Most calls finish without waiting, and a task costs more than many of them. Python 3.12 has eager tasks; this module
does the same on 3.11.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from starpod.env_server.operation.tenants import Tenant, loop_time

R = TypeVar("R")


def run_eagerly(coroutine: Coroutine[Any, Any, R], tenant: Tenant) -> tuple[R, None] | tuple[None, asyncio.Task[R]]:
    """Return the coroutine's result, or the task that continues it. Exceptions before the first wait propagate.

    Time that the coroutine spends in the event loop after its first wait is charged to the tenant. The caller charges
    the time before it, for many calls together, because reading a thread's clock is slow.
    """
    try:
        waiting_for = coroutine.send(None)
    except StopIteration as stop:
        return stop.value, None

    @types.coroutine
    def resume() -> Generator[Any, Any, R]:
        future = waiting_for
        while True:
            try:
                try:
                    value = yield future
                except BaseException as error:
                    start = loop_time()
                    future = coroutine.throw(error)
                else:
                    start = loop_time()
                    future = coroutine.send(value)
            except StopIteration as stop:
                result: R = stop.value
                return result
            finally:
                tenant.spent += loop_time() - start

    async def go_on() -> R:
        return await resume()

    return None, asyncio.get_running_loop().create_task(go_on())
