"""Handling of SIGTERM and Ctrl-C: the first signal saves and stops the run, and the second one stops it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class Interrupted(Exception):
    """A signal interrupted work that need not be finished."""


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal. The type distinguishes it from a KeyboardInterrupt that a user's function raises."""


class Interrupts:
    """Context in which a signal is remembered instead of ending the process.

        with Interrupts(notify=print) as interrupts:
            while not interrupts.requested and step < last:
                ...
            save()
        sys.exit(interrupts.status)

    The first signal sets `requested` and cancels the work in `unless_requested`. The second one raises
    StoppedAtOnce in the main thread, so that services are stopped but nothing is saved. The third one kills the
    process. Outside the main thread signals cannot be caught, and this context does nothing.

    Args:
        notify: Called with one sentence on what will happen. It runs in the main thread, between two instructions.
        ranks: Number of processes that train together. With several, a signal to one rank does not cancel work, because
            the other ranks would wait for it. All ranks stop when they next compare `requested`.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, notify: Callable[[str], None] | None = None, *, ranks: int = 1) -> None:
        self._notify = notify or (lambda _: None)
        self._alone = ranks == 1
        self._earlier_handlers: dict[signal.Signals, signal._HANDLER] = {}
        self._cancel: Callable[[], object] = lambda: None
        self._stops_at_once = False
        self.signal: signal.Signals | None = None

    async def unless_requested(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await one piece of work. If a signal arrives or has arrived, cancel it and raise Interrupted."""
        if not self._alone:
            return await work
        task = asyncio.ensure_future(work)
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if self.requested:
            self._cancel()  # start the task first, so that it can close what it was given
        try:
            return await task
        except asyncio.CancelledError:
            if not self.requested or self._stops_at_once:
                raise
            raise Interrupted from None
        finally:
            self._cancel = lambda: None

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine as `asyncio.run` does, in a loop that every signal wakes."""

        async def woken() -> Result:
            # A loop with a handler of its own watches a file that signals write to. Otherwise a signal that arrives
            # just before the loop waits, or in another thread, is only seen when something else wakes it.
            if self._earlier_handlers:
                asyncio.get_running_loop().add_signal_handler(signal.SIGURG, lambda: None)
            return await main

        return asyncio.run(woken())

    def raise_if_requested(self) -> None:
        """Raise Interrupted if a signal has arrived. Call this before slow work."""
        if self.requested and self._alone:
            raise Interrupted

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    @property
    def status(self) -> int:
        """Exit status: 0 without a signal, else 128 + its number (143 after SIGTERM, 130 after Ctrl-C).

        It lets scripts distinguish a stopped run from one that is done (0) or failed (1).
        """
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier_handlers = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._notify(f"{self.signal.name}: saving and stopping; a second signal stops at once, without saving")
            self._cancel()  # thread-safe call, because a handler must not touch the loop directly and must wake it
            return
        self._stops_at_once = True
        for signal_number in self.SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)
        self._notify(f"{signal.Signals(number).name} again: stopping without saving")
        raise StoppedAtOnce
