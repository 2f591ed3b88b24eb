"""Data-parallel training: torchrun starts the processes, FSDP2 shards the model among them.

A program that was started plainly is one process without any process group, and every method here is then trivial.

The rule for gradients: every rank weights its tokens by the whole batch, so the gradient of a step is the *sum* over
the ranks, never their mean. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

Item = TypeVar("Item")

TIMEOUT = timedelta(hours=2)
"""For which a rank waits for the others: their environments may be far slower than its own."""


_Inbox = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
_idle: list[_Inbox] = []
"""Where threads without work wait for some. They are used again: with a fresh thread for each piece of work, which had
its own part of malloc's memory, a process grew by over a gigabyte in each update of SmolLM2."""
MOST_IDLE = 4
"""How many of them wait, about: several may be through at once."""
_under_way: set[Future[Any]] = set()
# A forked process has none of the threads.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_under_way.clear)


class NoDevice(ValueError):
    """The device that a configuration names is not there, or not for one of several ranks. The message says why."""


class RankFailed(Exception):
    """Work of some rank failed, and all of them know. The message says why."""


class Parallel:
    """The ranks of a run. `start` makes it; collective methods must be called by all ranks, in the same order.

    rank: of this process. world: how many there are. device: what this rank computes on.
    """

    def __init__(self, rank: int = 0, world: int = 1, device: str | torch.device = "cpu") -> None:
        self.rank = rank
        self.world = world
        self.device = torch.device(device)

    @classmethod
    def start(cls, device: str = "auto") -> Parallel:
        """Joins the ranks that torchrun started, or is the only one.

        device: as `device_named` takes it. Raises NoDevice.
        """
        rank, world, _ = _ranks()
        chosen = device_named(device)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        if world > 1:
            # Objects travel over gloo either way; nccl knows tensors on GPUs only.
            backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        return cls(rank, world, chosen)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, checkpoints and reports."""
        return self.rank == 0

    def close(self) -> None:
        """Leaves the group. Harmless to repeat."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def end(self, status: int) -> None:
        """Ends the process with this status where it is one of several, or where a thread of `in_thread` is still at
        work; all must have been written. Else does nothing.

        gloo's threads let go of what the last exchange held in their own time. If Python is being torn down by then,
        the process aborts, and torchrun reports a failure of a run that was through. It aborts as well where a thread
        is still inside torch.
        """
        if self.world > 1 or _under_way:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    # --- work --------------------------------------------------------------------------------------------------------

    def split(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's share, in order: the ranks' shares one after the other are `items`, and differ by one at most."""
        small, larger = divmod(len(items), self.world)
        first = self.rank * small + min(self.rank, larger)
        return items[first : first + small + (self.rank < larger)]

    def share(self, blocks: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
        """This rank's blocks, and whether each is its own to be counted.

        Passes through a sharded model are collective, so all ranks make as many: one that has none left repeats the
        first block, whose loss must then be multiplied by 0.
        """
        for first in range(0, len(blocks), self.world):
            index = first + self.rank
            yield (blocks[index], True) if index < len(blocks) else (blocks[0], False)

    # --- exchange ----------------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds the ranks' tensors up, in place, and returns the tensor."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank: what one rank saw (a signal, the time), all of them act upon."""
        return any(self.gather_objects(flag))

    def gather_objects(self, item: Item) -> list[Item]:
        """Every rank's object, in the order of the ranks, on all of them."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items

    def broadcast_object(self, item: Item) -> Item:
        """The object of rank 0, on all ranks."""
        if self.world == 1:
            return item
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]

    async def in_thread(self, work: Callable[..., Item], /, *arguments: Any, **named: Any) -> Item:
        """Runs it in a thread, on this rank's device: a thread of its own begins on the first GPU, whatever the others
        chose, and there FSDP would make its streams.

        A program that is told to stop at once does not wait for the thread, as it would for one of asyncio's.
        """

        threads = torch.get_num_threads()

        def on_device() -> Item:
            torch.set_num_threads(threads)  # each thread has a number of its own
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return work(*arguments, **named)

        return await asyncio.wrap_future(_submit(on_device))

    async def all_done(self, work: Awaitable[Item]) -> list[Item]:
        """Every rank's result of its own work, in the order of the ranks, on all of them.

        Where it fails on one, it fails on all when all are through: no rank waits for one that is gone. Raises what
        the work raises; of several ranks RankFailed.
        """
        if self.world == 1:
            return [await work]
        result: Any = None
        error: Exception | None = None
        try:
            result = await work
        except Exception as raised:
            error = raised
        words = "" if error is None else str(error) or type(error).__name__
        # In a thread: a rank that waits for the others still plays.
        shares = await self.in_thread(self.gather_objects, (result, words))
        for rank, (_, failed) in enumerate(shares):
            if failed:
                raise RankFailed(f"rank {rank}: {failed}") from error
        return [item for item, _ in shares]

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        if self.world > 1:
            dist.barrier()

    # --- the model ---------------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> None:
        """Brings the model to `device`, and shares the parameters, gradients and, later, optimiser states out among the
        ranks.

        All ranks must hold the same weights; of those in CPU memory a GPU gets this rank's part alone. Optimisers are
        made afterwards. Each decoder layer is gathered when it is run; `forward` and `score` are the methods through
        which the model is run.
        """
        if self.world == 1:
            model.to(self.device)
            return
        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in [*_units(model), model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for shared in _sharded(model):
            shared.set_force_sum_reduction_for_comms(True)
            shared.set_gradient_divide_factor(1.0)
        if hasattr(model, "score"):
            register_fsdp_forward_method(model, "score")

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scales the gradients down so that their common norm is at most `limit`. Returns the norm before, a scalar."""
        return whole(nn.utils.clip_grad_norm_(parameters, limit))

    def copy_weights(self, model: nn.Module, replica: nn.Module) -> None:
        """Makes the whole, unshared module `replica` equal to `model`, tensor by tensor, on every rank.

        A sharded model can only be run by all ranks at once; an engine that samples at its own pace runs a replica.
        """
        reshard(model)
        targets = replica.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                targets[name].copy_(whole(tensor))

    # --- what a checkpoint holds -------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """The state dict of the unshared model, on the CPU, on rank 0; empty on the others. Ties stay ties.

        without: names to leave out. In one process it is the model's own memory.
        """
        reshard(model)
        state = model.state_dict(keep_vars=True)
        return self.gather({name: tensor for name, tensor in state.items() if name not in without})

    def load_full_state_dict(
        self, model: nn.Module, state: Mapping[str, Tensor], *, without: Collection[str] = ()
    ) -> None:
        """Loads a state dict of the unshared model; every rank gives all of it and keeps its part.

        without: names that the state may lack. Raises ValueError for other names or shapes than the model's.
        """
        reshard(model)
        own = model.state_dict(keep_vars=True)
        self.load({name: tensor for name, tensor in own.items() if name in state or name not in without}, state)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These tensors, whole, on rank 0 (of several ranks on the CPU); nothing on the others. One is gathered at a
        time. Collective."""
        full: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in seen:
                gathered = whole(tensor)
                seen[id(tensor)] = gathered if self.world == 1 else gathered.cpu() if self.is_main else torch.empty(0)
            full[name] = seen[id(tensor)]
        return full if self.is_main else {}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copies whole tensors into these, one after the other: each rank its part.

        Raises ValueError for other names or shapes.
        """
        if other := tensors.keys() ^ state.keys():
            raise ValueError(f"the saved state is of another model: {min(other)} is in one of them only")
        with torch.no_grad():
            for name, tensor in tensors.items():
                if tensor.shape != state[name].shape:
                    shapes = f"{list(state[name].shape)}, here {list(tensor.shape)}"
                    raise ValueError(f"the saved state is of another model: {name} has the shape {shapes}")
                tensor.detach().copy_(_like(state[name], tensor))

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimiser's state dict with parameters by name and whole tensors on the CPU, the same for any number of
        ranks. Complete on rank 0; tensors are missing on the others."""
        reshard(model)
        names = _names(model)
        state: dict[str, Any] = {}
        for parameter, slots in _in_order(optimizer):
            gathered = {slot: whole(value) if isinstance(value, Tensor) else value for slot, value in slots.items()}
            if self.is_main:
                state[names[id(parameter)]] = {
                    slot: value.cpu() if isinstance(value, Tensor) else value for slot, value in gathered.items()
                }
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Loads what `optimizer_state` gave on rank 0, here on any number of ranks; every rank gives all of it.

        Raises ValueError if the optimiser has other parameters.
        """
        reshard(model)
        names = _names(model)
        mine = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in state["param_groups"]]
        if mine != theirs:
            raise ValueError(
                f"the optimiser's state is of {sum(map(len, theirs))} parameters in {len(theirs)} groups and does not "
                f"fit this one's {sum(map(len, mine))} in {len(mine)}: the model or what of it is trained has changed"
            )
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        places = {name: place for place, name in enumerate(parameters)}
        optimizer.load_state_dict(
            {
                "state": {
                    places[name]: {
                        slot: _like(value, parameters[name]).clone() if isinstance(value, Tensor) else value
                        for slot, value in slots.items()
                    }
                    for name, slots in state["state"].items()
                },
                "param_groups": [
                    {**group, "params": [places[name] for name in group["params"]]} for group in state["param_groups"]
                ],
            }
        )


def _ranks() -> tuple[int, int, int]:
    """Rank, number of ranks and local rank, as torchrun tells them."""
    told = os.environ
    return int(told.get("RANK", "0")), int(told.get("WORLD_SIZE", "1")), int(told.get("LOCAL_RANK", "0"))


def _submit(work: Callable[[], Item]) -> Future[Item]:
    """Runs it at once, in a thread that has no other work."""
    done: Future[Item] = Future()
    done.set_running_or_notify_cancel()
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="starpod-work").start()
    _under_way.add(done)
    inbox.put((work, done))
    return done


def _serve(inbox: _Inbox) -> None:
    """The loop of a thread: runs one piece of work after another, and keeps no reference to finished work.

    The thread ends when MOST_IDLE other threads already wait for work.
    """
    stays = True
    while stays:
        work, done = inbox.get()
        try:
            tell = partial(done.set_result, work())
        except BaseException as error:
            tell = partial(done.set_exception, error)
        del work
        # Before it is told, so that whoever then has more work finds this thread.
        _under_way.discard(done)
        if stays := len(_idle) < MOST_IDLE:
            _idle.append(inbox)
        tell()
        del tell, done


def device_named(device: str) -> torch.device:
    """The device that a configuration names: "cpu", "cuda", "cuda:1", ...; "auto" is the GPU where there is one.

    Of several ranks that torchrun started, each takes the GPU of its local rank. Raises NoDevice.
    """
    _, world, local = _ranks()
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if chosen.type != "cuda":
        return chosen
    if world > 1 and chosen.index is not None:
        raise NoDevice(f"device {device}: of several processes each takes its own GPU; give device=cuda")
    # torch takes no device without an index for the current one.
    chosen = torch.device("cuda", local if world > 1 else chosen.index or 0)
    if chosen.index >= (seen := torch.cuda.device_count()):
        build = "" if torch.version.cuda or torch.version.hip else ", and this build of it is for CPUs alone"
        raise NoDevice(f"device {chosen} is not there: GPUs that torch sees: {seen}{build}; device=cpu uses none")
    return chosen


def _units(model: nn.Module) -> list[nn.Module]:
    """Units that are gathered by themselves: decoder layers, as transformers names them; and, because what a unit
    trains must be of one dtype, modules outside of them that differ from the rest (a critic's head in float32)."""
    kinds = {kind for module in model.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    inside = {id(module) for layer in layers for module in layer.modules()}
    usual = next(model.parameters()).dtype
    others = [
        module
        for module in model.modules()
        if id(module) not in inside and any(own.dtype != usual for own in module.parameters(recurse=False))
    ]
    return layers + others


def _sharded(model: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Gives up what a pass gathered: after one without a backward the root's parameters still are, and the optimiser
    knows the shards only."""
    for module in _sharded(model):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank holds a part. Collective if it is one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(full: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of `full`, shared out as `tensor` is; one of another shape (a counter) is not shared out.

    No more of `full` is read than that part: it may lie in a file.
    """
    if not isinstance(tensor, DTensor) or full.shape != tensor.shape:
        return full
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    assert isinstance(placement, Shard)
    # As torch.chunk: equal parts, and fewer or none for the last ranks.
    length = full.shape[placement.dim]
    part = -(-length // mesh.size())
    first = min(mesh.get_local_rank() * part, length)
    local = full.narrow(placement.dim, first, min(part, length - first)).to(tensor.device)
    return DTensor.from_local(local, mesh, (placement,), run_check=False, shape=full.shape, stride=full.stride())


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _in_order(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Parameters that have a state, in the order that is the same on all ranks."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                yield parameter, optimizer.state[parameter]
