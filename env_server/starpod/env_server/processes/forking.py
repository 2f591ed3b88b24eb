"""The fork server from which processes of environments and of untrusted code start.

It imports once what every child needs, so that a child starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, process
from multiprocessing.context import ForkServerContext

from starpod.env_server.temporary import own_folder

_preloaded = ["starpod.env_server.processes.process_host", "decimal", "heapq", "statistics", "string", "typing"]
"""Modules that the fork server imports, until its first child; the latter ones for untrusted programs."""

_OURS = "starpod"
"""Value of PYTHONSAFEPATH that we set, as opposed to the user. Python heeds any value."""


def fork_context() -> ForkServerContext:
    """The context that makes processes of the fork server, which the first one starts."""
    # Environments iterate over sets of text, and the same seed must give the same episode in every process.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    # Else the sockets of a killed server stay in a folder of multiprocessing's, which nobody can tell from others'.
    config = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        config["tempdir"] = str(own_folder())
    # Without this a queue.py in the working folder would be imported instead of the standard library's.
    os.environ.setdefault("PYTHONSAFEPATH", _OURS)
    try:
        forkserver.ensure_running()
    finally:
        _forget_safe_path()
    return context


def preload(*modules: str) -> None:
    """Have the fork server import these modules, too, so that its children need not. Too late for one that runs."""
    _preloaded.extend(name for name in modules if name not in _preloaded)


def warm_up() -> None:
    """Starts the fork server and waits until it has imported what is preloaded, so that no session waits for that."""
    first = fork_context().Process(target=_nothing, daemon=True)
    first.start()
    first.join()


def _nothing() -> None:
    pass


def leave_fork_server() -> None:
    """Lets this child end with the server: the fork server ends with it, unless a child keeps its pipe open."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    _forget_safe_path()


def _forget_safe_path() -> None:
    """Remove the variable that only the fork server needs: a program of an environment imports from its own folder."""
    if os.environ.get("PYTHONSAFEPATH") == _OURS:
        del os.environ["PYTHONSAFEPATH"]
