"""Checks after a call of a user's code: whether Ctrl-C interrupted it, and whether it forked the process."""

from __future__ import annotations

import os
import signal
import threading


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether a signal raised this KeyboardInterrupt, and not the code that it came from.

    Python itself raises one only in the main thread, and only while its own handler is installed. Our handlers raise a
    subclass.
    """
    if type(error) is not KeyboardInterrupt:
        return isinstance(error, KeyboardInterrupt)
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def end_forked_copy(process_id: int, what: str) -> None:
    """End this process if it is a copy that a user's code forked and then let go on.

    Otherwise, two processes would write to the same folder and sockets.

    Args:
        process_id: Id of the process that called the code.
        what: Name of the code, for the message.
    """
    if os.getpid() != process_id:
        message = f"{what} called os.fork(), and the new process returned from it: it was ended; end it with os._exit\n"
        os.write(2, message.encode(errors="replace"))
        os._exit(1)
