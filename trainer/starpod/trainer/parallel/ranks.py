"""The ranks of a run: torchrun starts the processes, which divide the work and exchange results.

A program that was not started by torchrun is one process without a process group, for which every method here is
trivial. sharding.py divides a model among the ranks.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from starpod.client import BadArgument, UnknownEnvironment, UnknownVersion
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.parallel import threads

Item = TypeVar("Item")

TIMEOUT = timedelta(hours=2)
"""Timeout of collective operations. It is long because other ranks' environments may be far slower."""


class NoDevice(ValueError):
    """The configured device does not exist, or cannot be used by one of several ranks. The message says why."""


INPUT_ERRORS = (ConfigError, UserCodeError, BadArgument, UnknownEnvironment, UnknownVersion)
"""Errors that the user's configuration or files cause."""


class RankFailed(Exception):
    """The work of some rank failed, and all ranks raise this. The message says why."""


class RankRefused(RankFailed):
    """An input error (see INPUT_ERRORS) of some rank, which all ranks raise."""


class Parallel:
    """The ranks of a run. Use `start` to make one. Collective methods must be called by all ranks, in the same order.

    Attributes:
        rank: Rank of this process.
        world: Number of ranks.
        device: Device on which this rank computes.
        per_engine: Number of consecutive ranks, all on one machine, whose devices run one engine. The first of them
            plays and samples for all.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, device: str | torch.device = "cpu", *, per_engine: int = 1
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = torch.device(device)
        self.per_engine = per_engine
        self._group: dist.ProcessGroup | None = None  # None is the group of all ranks

    @classmethod
    def start(cls, device: str = "auto", *, per_engine: int = 1) -> Parallel:
        """Join the ranks that torchrun started; without torchrun, return a single rank.

        device: see `device_named`. Raises NoDevice.
        """
        rank, world, _ = _ranks()
        torch_device = device_named(device)
        if torch_device.type == "cuda":
            torch.cuda.set_device(torch_device)
        if world > 1:
            # Objects always use gloo, because nccl only supports tensors on GPUs.
            backend = "cpu:gloo,cuda:nccl" if torch_device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        return cls(rank, world, torch_device, per_engine=per_engine if world > 1 else 1)

    def apart(self) -> Parallel:
        """Return the same ranks with their own process group, to exchange objects in another thread. Collective."""
        parallel = Parallel(self.rank, self.world, self.device)
        if self.world > 1:
            parallel._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return parallel

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, checkpoints and reports."""
        return self.rank == 0

    @property
    def is_first_on_machine(self) -> bool:
        """Whether this rank writes files that only its machine needs."""
        return self.world == 1 or _ranks()[2] == 0

    def close(self) -> None:
        """Leave the process group. May be called repeatedly."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def end(self, status: int) -> None:
        """Exit the process at once if it is one of several, or if a thread of `in_thread` is still busy.

        Write all output before calling this. gloo's threads release their buffers some time after the last exchange. If
        Python is being torn down by then, the process aborts, and torchrun reports a finished run as failed. The
        process also aborts if a thread is still inside torch.
        """
        if self.world > 1 or threads.under_way:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    # --- work --------------------------------------------------------------------------------------------------------

    @property
    def has_engine(self) -> bool:
        """Whether this rank plays and samples."""
        return self.rank % self.per_engine == 0

    def plays(self, group: int) -> bool:
        """Return whether this rank plays the group with this number."""
        return group % (self.world // self.per_engine) * self.per_engine == self.rank

    def split(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's share of the items, in order. The shares' sizes differ by at most one.

        A rank without an engine gets none.
        """
        if not self.has_engine:
            return items[:0]
        return equal_parts(items, self.world // self.per_engine)[self.rank // self.per_engine]

    def share(self, blocks: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
        """Yield this rank's blocks, and whether each one counts.

        Passes through a sharded model are collective, so all ranks make the same number of them. A rank without a block
        left repeats the first one, and its loss must be multiplied by 0.
        """
        for first in range(0, len(blocks), self.world):
            index = first + self.rank
            yield (blocks[index], True) if index < len(blocks) else (blocks[0], False)

    # --- exchange ----------------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' tensors in place, and return the tensor."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank. All ranks can then act on one rank's signal."""
        return any(self.gather_objects(flag))

    def gather_objects(self, item: Item) -> list[Item]:
        """Return all ranks' objects, in rank order, on every rank."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=self._group)
        return items

    def broadcast_object(self, item: Item) -> Item:
        """Return the object of rank 0 on all ranks."""
        if self.world == 1:
            return item
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]

    def broadcast_on_machine(self, item: Item) -> Item:
        """Return the object of the first rank on this machine. All ranks of all machines take part."""
        machine = os.environ.get("GROUP_RANK", "")
        return next(value for name, value in self.gather_objects((machine, item)) if name == machine)

    async def in_thread(self, work: Callable[..., Item], /, *arguments: Any, **named: Any) -> Item:
        """Run work in a thread, on this rank's device.

        A fresh thread starts on the first GPU, and FSDP would create its streams there. Unlike with asyncio's threads,
        a program that must stop at once does not wait for the thread.
        """

        thread_count = torch.get_num_threads()

        def on_device() -> Item:
            torch.set_num_threads(thread_count)  # the setting is per thread
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return work(*arguments, **named)

        return await asyncio.wrap_future(threads.submit(on_device))

    async def all_done(self, work: Awaitable[Item]) -> list[Item]:
        """Await this rank's work, and return the results of all ranks in rank order.

        If the work fails on one rank, all ranks raise once all are done, so that none waits for a rank that is gone. A
        single rank raises the work's exception, and several ranks raise RankFailed.
        """
        if self.world == 1:
            return [await work]
        result: Any = None
        error: Exception | None = None
        try:
            result = await work
        except RankFailed:
            raise  # all ranks raise it
        except Exception as raised:
            error = raised
        # Wait in a thread, so that a rank that waits for the others continues to play.
        return await self.in_thread(self._outcomes, result, error)

    def do_together(self, work: Callable[[], Item]) -> list[Item]:
        """Do this rank's work, and return the results of all ranks as `all_done` does, without an event loop."""
        if self.world == 1:
            return [work()]
        try:
            return self._outcomes(work(), None)
        except RankFailed:
            raise
        except Exception as error:
            return self._outcomes(None, error)

    def _outcomes(self, result: Any, error: Exception | None) -> list[Any]:
        words = "" if error is None else str(error) or type(error).__name__
        outcomes = self.gather_objects((result, words, isinstance(error, INPUT_ERRORS)))
        for rank, (_, message, is_input) in enumerate(outcomes):
            if message:
                raise (RankRefused if is_input else RankFailed)(f"rank {rank}: {message}") from error
        return [item for item, *_ in outcomes]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.world > 1:
            dist.barrier()


def equal_parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split items into `count` parts, in order, whose sizes differ by at most one."""
    size, remainder = divmod(len(items), count)
    edges = [index * size + min(index, remainder) for index in range(count + 1)]
    return [items[first:end] for first, end in pairwise(edges)]


def _ranks() -> tuple[int, int, int]:
    """Return the rank, the number of ranks and the local rank from torchrun's environment variables."""
    environ = os.environ
    return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")), int(environ.get("LOCAL_RANK", "0"))


def device_named(device: str) -> torch.device:
    """Return the configured device: "cpu", "cuda", "cuda:1", ...; "auto" is the GPU if there is one.

    With several ranks, each one uses the GPU of its local rank. Raises NoDevice.
    """
    _, world, local = _ranks()
    result = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if result.type != "cuda":
        return result
    if world > 1 and result.index is not None:
        raise NoDevice(f"device {device}: with several processes, each uses its own GPU; give device=cuda")
    # Give an index, which torch.cuda.set_device needs.
    result = torch.device("cuda", local if world > 1 else result.index or 0)
    if result.index >= (count := torch.cuda.device_count()):
        build = "" if torch.version.cuda or torch.version.hip else ", and this build of torch is only for CPUs"
        raise NoDevice(f"device {result} is not available: GPUs that torch sees: {count}{build}; device=cpu uses none")
    return result
