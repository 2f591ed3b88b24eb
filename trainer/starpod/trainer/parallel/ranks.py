"""Data-parallel training: torchrun starts the processes, and FSDP2 shards the model among them.

A program that was not started by torchrun is one process without a process group, for which every method here is
trivial. Every rank weights its tokens by the whole batch, so the gradient of a step is the *sum* over ranks, not their
mean. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

Item = TypeVar("Item")

TIMEOUT = timedelta(hours=2)
"""Timeout of collective operations. It is long because other ranks' environments may be far slower."""


_Inbox = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
_idle: list[_Inbox] = []
"""Inboxes of idle threads, which are reused. A fresh thread for each piece of work would have its own malloc arena,
which made the process grow by over a gigabyte in each update of SmolLM2."""
MOST_IDLE = 4
"""Approximate number of idle threads to keep. It may be exceeded if several finish at once."""
_under_way: set[Future[Any]] = set()
# A forked process has none of these threads.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_under_way.clear)


class NoDevice(ValueError):
    """The configured device does not exist, or cannot be used by one of several ranks. The message says why."""


class RankFailed(Exception):
    """The work of some rank failed, and all ranks raise this. The message says why."""


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
        if self.world > 1 or _under_way:
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

        threads = torch.get_num_threads()

        def on_device() -> Item:
            torch.set_num_threads(threads)  # the setting is per thread
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return work(*arguments, **named)

        return await asyncio.wrap_future(_submit(on_device))

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
        outcomes = self.gather_objects((result, words))
        for rank, (_, message) in enumerate(outcomes):
            if message:
                raise RankFailed(f"rank {rank}: {message}") from error
        return [item for item, _ in outcomes]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.world > 1:
            dist.barrier()

    # --- the model ---------------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> None:
        """Move the model to `device`, and shard its parameters, gradients and, later, optimiser states among the ranks.

        All ranks must hold the same weights. If these are in CPU memory, each GPU receives only its part. Create
        optimisers afterwards. Each decoder layer is gathered when it runs. Run the model with `forward` or `score`
        only.
        """
        if self.world == 1:
            model.to(self.device)
            return
        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in [*_units(model), model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for submodule in _sharded(model):
            submodule.set_force_sum_reduction_for_comms(True)
            submodule.set_gradient_divide_factor(1.0)
        if hasattr(model, "score"):
            register_fsdp_forward_method(model, "score")

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to a total norm of at most `limit`, and return the norm before scaling, a scalar."""
        return whole(nn.utils.clip_grad_norm_(parameters, limit))

    def copy_weights(self, model: nn.Module, replica: nn.Module) -> None:
        """Copy the weights of `model` to the whole, unsharded module `replica`, tensor by tensor, on every rank.

        A sharded model can only run on all ranks at once. An engine that samples at its own pace needs a replica.
        """
        reshard(model)
        targets = replica.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                targets[name].copy_(whole(tensor))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the model's state dict, whose tensors may be sharded and share the model's memory. Ties are kept.

        without: names to leave out.
        """
        reshard(model)
        state = model.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if name not in without}

    def load_full_state_dict(
        self, model: nn.Module, state: Mapping[str, Tensor], *, without: Collection[str] = ()
    ) -> None:
        """Load a state dict of unsharded tensors, such as a checkpoint's, on every rank. Each rank keeps its shards.

        without: names that may be missing. Raises ValueError if names or shapes differ from the model's.
        """
        reshard(model)
        tensors = model.state_dict(keep_vars=True)
        self.load({name: tensor for name, tensor in tensors.items() if name in state or name not in without}, state)

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copy whole tensors from `state` into `tensors`, one by one. Each rank copies its part.

        Raises ValueError if names or shapes differ.
        """
        if names := tensors.keys() ^ state.keys():
            raise ValueError(f"the saved state is of another model: {min(names)} is in one of them only")
        with torch.no_grad():
            for name, tensor in tensors.items():
                if tensor.shape != state[name].shape:
                    shapes = f"{list(state[name].shape)}, here {list(tensor.shape)}"
                    raise ValueError(f"the saved state is of another model: {name} has the shape {shapes}")
                tensor.detach().copy_(_like(state[name], tensor))

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimiser's state dict with named parameters. Its tensors may be sharded."""
        reshard(model)
        names = _names(model)
        state = {names[id(parameter)]: dict(slots) for parameter, slots in _in_order(optimizer)}
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load an optimiser state of unsharded tensors on every rank. The number of ranks may have changed.

        Raises ValueError if the optimiser has different parameters.
        """
        reshard(model)
        names = _names(model)
        order = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        source = [group["params"] for group in state["param_groups"]]
        if order != source:
            raise ValueError(
                f"the optimiser's state is of {sum(map(len, source))} parameters in {len(source)} groups and does "
                f"not fit this one's {sum(map(len, order))} in {len(order)}: the model or its trained parameters "
                "have changed"
            )
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        indices = {name: index for index, name in enumerate(parameters)}
        optimizer.load_state_dict(
            {
                "state": {
                    indices[name]: {
                        slot: _like(value, parameters[name]).clone() if isinstance(value, Tensor) else value
                        for slot, value in slots.items()
                    }
                    for name, slots in state["state"].items()
                },
                "param_groups": [
                    {**group, "params": [indices[name] for name in group["params"]]} for group in state["param_groups"]
                ],
            }
        )


def equal_parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split items into `count` parts, in order, whose sizes differ by at most one."""
    size, remainder = divmod(len(items), count)
    edges = [index * size + min(index, remainder) for index in range(count + 1)]
    return [items[first:end] for first, end in pairwise(edges)]


def _ranks() -> tuple[int, int, int]:
    """Return the rank, the number of ranks and the local rank from torchrun's environment variables."""
    environ = os.environ
    return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")), int(environ.get("LOCAL_RANK", "0"))


def _submit(work: Callable[[], Item]) -> Future[Item]:
    """Run work at once, in a thread that has no other work."""
    future: Future[Item] = Future()
    future.set_running_or_notify_cancel()
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="starpod-work").start()
    _under_way.add(future)
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
        _under_way.discard(future)
        if stays := len(_idle) < MOST_IDLE:
            _idle.append(inbox)
        report()
        del report, future


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


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers separately.

    They are the decoder layers, as transformers names them, and modules outside of them with a different dtype, such as
    a critic's head in float32. The parameters of one unit must have the same dtype.
    """
    kinds = {kind for module in model.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    layer_ids = {id(module) for layer in layers for module in layer.modules()}
    dtype = next(model.parameters()).dtype
    modules = [
        module
        for module in model.modules()
        if id(module) not in layer_ids and any(p.dtype != dtype for p in module.parameters(recurse=False))
    ]
    return layers + modules


def _sharded(model: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Release the parameters that a pass gathered.

    After a pass without backward, the root module's parameters are still gathered, but the optimiser only knows the
    shards.
    """
    for module in _sharded(model):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor. Collective if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(full: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of `full`, sharded like `tensor`; all of it if the shapes differ (a step counter).

    Only that part is read, because `full` may be memory-mapped.
    """
    if not isinstance(tensor, DTensor) or full.shape != tensor.shape:
        return full
    rows, first = rows_of(tensor)
    local = full.narrow(0, first, len(rows)).to(tensor.device)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor and the index of the first one; all rows of an unsharded tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    (placement,) = tensor.placements
    assert isinstance(placement, Shard) and placement.dim == 0, "FSDP shards rows"
    # FSDP splits as torch.chunk does: equal parts, with fewer or no rows for the last ranks.
    part = -(-len(tensor) // tensor.device_mesh.size())
    return tensor.to_local().detach(), min(tensor.device_mesh.get_local_rank() * part, len(tensor))


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _in_order(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yield each parameter that has optimizer state, and this state, in the same order on all ranks."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                yield parameter, optimizer.state[parameter]
