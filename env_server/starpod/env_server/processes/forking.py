"""The fork server that starts processes of environments and of untrusted code.

It imports once what every child needs, so that a child starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, process
from multiprocessing.context import ForkServerContext

from starpod.env_server.episodes.temporary import own_folder

_preloaded = ["starpod.env_server.processes.child", "decimal", "heapq", "statistics", "string", "typing"]
"""Modules that the fork server imports before its first child. Those of the standard library are there for untrusted
programs."""

_OURS = "starpod"
"""Value of PYTHONSAFEPATH that shows that we set it, not the user. Any value works for Python."""


def fork_context() -> ForkServerContext:
    """Return the multiprocessing context whose processes come from the fork server, and start the server if needed."""
    # Environments iterate over sets of text, and a seed must give the same episode in every process.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    # Otherwise the sockets of a killed server stay in a folder of multiprocessing, which is not recognizable as ours.
    config = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        config["tempdir"] = str(own_folder())
    # Without this, a queue.py in the working folder would replace the standard library's module.
    os.environ.setdefault("PYTHONSAFEPATH", _OURS)
    try:
        forkserver.ensure_running()
    finally:
        _forget_safe_path()
    return context


def preload(*modules: str) -> None:
    """Let the fork server import these modules, too, so that children need not. Call this before the server starts."""
    _preloaded.extend(name for name in modules if name not in _preloaded)


def warm_up() -> None:
    """Start the fork server and wait for its imports, so that no session has to wait for them."""
    child = fork_context().Process(target=_nothing, daemon=True)
    child.start()
    child.join()


def _nothing() -> None:
    pass


def leave_fork_server() -> None:
    """Let this child end with the server. The fork server does not exit while a child keeps its pipe open."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    _forget_safe_path()


def _forget_safe_path() -> None:
    """Remove our PYTHONSAFEPATH, which only the fork server needs.

    Programs that environments start must be able to import from their own folder.
    """
    if os.environ.get("PYTHONSAFEPATH") == _OURS:
        del os.environ["PYTHONSAFEPATH"]
