"""A pool of threads."""

import asyncio
import threading

from starpod.env_server.processes.threads import ThreadPool


async def test_a_function_that_ends_at_its_limit_does_not_hang() -> None:
    loop, told = asyncio.get_running_loop(), threading.Event()
    tell = loop.call_soon_threadsafe

    def tell_late(*arguments: object) -> asyncio.Handle:
        told.wait(60)
        return tell(*arguments)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = tell_late  # type: ignore[method-assign, assignment]
    pool = ThreadPool(1, 0.01, "test")
    loop.call_later(0.05, told.set)
    assert await pool.run(lambda: "done") == "done"
    assert (pool._busy, pool.abandoned) == (0, 0)
    pool.shut_down()
