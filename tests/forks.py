"""Processes that are forks of one that has imported torch and has no threads.

A fork of pytest's own process may crash, because other tests leave threads of gRPC in it, and a fresh process takes
seconds to import torch.
"""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from tests.support import held_port

_forks = multiprocessing.get_context("forkserver")


def start_fork(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of a module in a process, and return the process."""
    _forks.set_forkserver_preload(["torch", "transformers.modeling_utils", work.__module__])
    process = _forks.Process(target=work, args=arguments)
    process.start()
    return process


def run_forks(count: int, work: Callable[..., Any], *arguments: Any) -> list[int | None]:
    """Run a function of a module in `count` processes at once, and return their exit statuses."""
    processes = [start_fork(work, *arguments) for _ in range(count)]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run_ranks(work: Callable[..., Any], *arguments: Any) -> None:
    """Run a function of a module as each of two ranks, with the variables that torchrun sets."""
    with held_port() as port:
        ranks = [start_fork(_become, rank, port, work, *arguments) for rank in range(2)]
        for rank in ranks:
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def _become(rank: int, port: int, work: Callable[..., Any], *arguments: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(*arguments)
