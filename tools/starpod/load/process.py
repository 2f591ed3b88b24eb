"""What runs in a generator process: it takes orders through a pipe and answers with what it saw."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

from starpod.client.garbage import look_rarely
from starpod.load.generator import Doomed, Generator
from starpod.load.log import Interval
from starpod.load.plan import Plan

# Orders: ("prepare", Stage), ("go", instant), ("stop",), ("quit",).
# Answers: ("ready",), ("interval", Interval), ("finished", Summary), ("doomed", why), ("closed", Interval, recorded).


def generate(plan: Plan, process: int, pipe: Connection[Any, Any]) -> None:
    """The main function of a generator process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who tells us
    look_rarely()
    with asyncio.Runner(loop_factory=lambda: _loop(plan)) as runner:
        runner.run(_obey(plan, process, pipe))
    # gRPC's threads have nothing left to do that is worth waiting for.
    pipe.close()
    os._exit(0)


def _loop(plan: Plan) -> asyncio.AbstractEventLoop:
    """select() takes its timeout in microseconds, epoll() in milliseconds: a step due in 0.2 ms would be sent after 1.
    It takes no more than 1,024 files, which is enough where a server's sessions share a connection.
    """
    if plan.wire == "openenv":
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _obey(plan: Plan, process: int, pipe: Connection[Any, Any]) -> None:
    def tell(interval: Interval) -> None:
        pipe.send(("interval", interval))

    orders: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    stop = asyncio.Event()

    def listen() -> None:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone
        if order[0] == "stop":
            stop.set()
        else:
            orders.put_nowait(order)

    asyncio.get_running_loop().add_reader(pipe.fileno(), listen)
    generator = Generator(plan, process, tell)
    connected = False
    while True:
        order = await orders.get()
        try:
            match order:
                case "prepare", stage:
                    if not connected:
                        await _unless(stop, generator.start())
                        connected = True
                    await _unless(stop, generator.prepare(stage))
                    pipe.send(("ready",))
                case "go", instant:
                    pipe.send(("finished", await generator.run(instant, stop)))
                case ("quit",):
                    pipe.send(("closed", await generator.close(), generator.crew.recorded))
                    return
        except Doomed as doom:
            tell(generator.crew.log.take(-1))
            pipe.send(("doomed", str(doom)))


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Does the work unless it is told to stop. Raises Doomed then."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Doomed("interrupted")
        task.result()
    finally:
        task.cancel()
        stopping.cancel()
