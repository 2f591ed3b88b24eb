"""Threads for work that holds a device for long. They are reused, and no program waits for them when it stops."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Item = TypeVar("Item")
_Inbox = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
_idle: list[_Inbox] = []
"""Inboxes of idle threads, which are reused. A fresh thread for each piece of work would have its own malloc arena,
which made the process grow by over a gigabyte in each update of SmolLM2."""
MOST_IDLE = 4
"""Approximate number of idle threads to keep. It may be exceeded if several finish at once."""
under_way: set[Future[Any]] = set()
"""Work that has not ended."""
# A forked process has none of these threads.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=under_way.clear)


def submit(work: Callable[[], Item]) -> Future[Item]:
    """Run work at once, in a thread that has no other work."""
    future: Future[Item] = Future()
    future.set_running_or_notify_cancel()
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="starpod-work").start()
    under_way.add(future)
    inbox.put((work, future))
    return future


def _serve(inbox: _Inbox) -> None:
    """Run one piece of work after another. The thread keeps no reference to finished work.

    It ends if MOST_IDLE other threads already wait for work.
    """
    stays = True
    while stays:
        work, future = inbox.get()
        try:
            report = partial(future.set_result, work())
        except BaseException as error:
            report = partial(future.set_exception, error)
        del work
        # Become idle before reporting the result, so that the caller's next work can use this thread.
        under_way.discard(future)
        if stays := len(_idle) < MOST_IDLE:
            _idle.append(inbox)
        report()
        del report, future
