"""SIGTERM and Ctrl-C: end what is played, save and stop; the second time, stop at once."""

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
    """A signal came while something was awaited that need not be finished."""


class Interrupts:
    """While the context lasts, a signal is remembered instead of ending the process.

        with Interrupts(notify=print) as interrupts:
            while not interrupts.requested and step < last:
                ...
            save()
        sys.exit(interrupts.status)

    The first signal sets `requested` and ends what is awaited by `unless_requested`. The second one raises
    KeyboardInterrupt in the main thread, so that services are stopped on the way out and nothing is saved. The third
    one kills the process.
    notify: is told what will happen, in one sentence. It runs in the main thread, between two of its instructions.
    ranks: processes that work together. Of several one may get a signal alone, and the others would wait for it: then
    nothing is ended by it, and all stop where they ask each other.

    Outside the main thread, where signals cannot be caught, it does nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, notify: Callable[[str], None] | None = None, *, ranks: int = 1) -> None:
        self._notify = notify or (lambda _: None)
        self._alone = ranks == 1
        self._earlier: dict[signal.Signals, signal._HANDLER] = {}
        self._cancel: Callable[[], object] = lambda: None
        self._at_once = False
        self.signal: signal.Signals | None = None

    async def unless_requested(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits it, one at a time; at the first signal, or if it has come, cancels it and raises Interrupted."""
        if not self._alone:
            return await work
        task = asyncio.ensure_future(work)
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if self.requested:
            self._cancel()  # not before it has begun: what it was given may have to be awaited
        try:
            return await task
        except asyncio.CancelledError:
            if not self.requested or self._at_once:
                raise
            raise Interrupted from None
        finally:
            self._cancel = lambda: None

    def raise_if_requested(self) -> None:
        """Raises Interrupted after a signal: for the beginning of what takes long."""
        if self.requested and self._alone:
            raise Interrupted

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status: 0 without a signal; 143 after SIGTERM and 130 after Ctrl-C (128 + its number), by which
        scripts and schedulers know a run that was stopped from one that is done (0) or failed (1)."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._notify(f"{self.signal.name}: saving and stopping; once more stops at once, without saving")
            self._cancel()  # by way of the loop, which a handler may not touch and which sleeps until it is told
            return
        self._at_once = True
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._notify(f"{signal.Signals(number).name} again: stopping without saving")
        raise KeyboardInterrupt
