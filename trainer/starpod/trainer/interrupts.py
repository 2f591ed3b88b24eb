"""SIGTERM and Ctrl-C: save and stop after the present step; the second time, stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class Interrupts:
    """While the context lasts, a signal is remembered instead of ending the process.

        with Interrupts(notify=print) as interrupts:
            while not interrupts.requested and step < last:
                ...
            save()
        sys.exit(interrupts.status)

    The first signal sets `requested`. The second one raises KeyboardInterrupt in the main thread, so that services are
    stopped on the way out and nothing is saved. The third one kills the process.
    notify: is told what will happen, in one sentence. It runs in the main thread, between two of its instructions.

    Outside the main thread, where signals cannot be caught, it does nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, notify: Callable[[str], None] | None = None) -> None:
        self._notify = notify or (lambda _: None)
        self._earlier: dict[signal.Signals, signal._HANDLER] = {}
        self.signal: signal.Signals | None = None

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
            self._notify(f"{self.signal.name}: saving and stopping after this step; once more stops at once")
            return
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._notify(f"{signal.Signals(number).name} again: stopping without saving")
        raise KeyboardInterrupt
