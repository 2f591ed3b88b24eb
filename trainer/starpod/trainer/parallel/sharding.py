"""The weights and the optimiser state of a model that FSDP2 shards among the ranks of a run.

Every function also takes an unsharded model, for which it is trivial. Those on a sharded model are collective. Every
rank weights its tokens by the whole batch, so the gradient of a step is the *sum* over ranks, not their mean.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard


def shard(model: nn.Module, world: int, device: torch.device) -> None:
    """Move the model to the device, and shard its parameters, gradients and, later, optimiser states among the ranks.

    All ranks must hold the same weights. If these are in CPU memory, each GPU receives only its part. Create
    optimisers afterwards. Each decoder layer is gathered when it runs. Run the model with `forward` or `score`
    only.

    Args:
        world: Number of ranks. With 1 the model is only moved.
    """
    if world == 1:
        model.to(device)
        return
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in [*_units(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for submodule in _sharded(model):
        submodule.set_force_sum_reduction_for_comms(True)
        submodule.set_gradient_divide_factor(1.0)
    if hasattr(model, "score"):
        register_fsdp_forward_method(model, "score")


def clip_grad_norm(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients down to a total norm of at most `limit`, and return the norm before scaling, a scalar."""
    return whole(nn.utils.clip_grad_norm_(parameters, limit))


def copy_weights(model: nn.Module, replica: nn.Module) -> None:
    """Copy the weights of `model` to the whole, unsharded module `replica`, tensor by tensor, on every rank.

    A sharded model can only run on all ranks at once. An engine that samples at its own pace needs a replica.
    """
    reshard(model)
    targets = replica.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            targets[name].copy_(whole(tensor))


def state_dict(model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the model's state dict, whose tensors may be sharded and share the model's memory. Ties are kept.

    without: names to leave out.
    """
    reshard(model)
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in without}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], *, without: Collection[str] = ()) -> None:
    """Load a state dict of unsharded tensors, such as a checkpoint's, on every rank. Each rank keeps its shards.

    Args:
        state: Whole tensors by name, on every rank.
        without: Names that may be missing.

    Raises:
        ValueError: Names or shapes differ from the model's.
    """
    reshard(model)
    tensors = model.state_dict(keep_vars=True)
    load({name: tensor for name, tensor in tensors.items() if name in state or name not in without}, state)


def load(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy whole tensors from `state` into `tensors`, one by one. Each rank copies its part.

    Raises ValueError if names or shapes differ.
    """
    if names := tensors.keys() ^ state.keys():
        raise ValueError(f"the saved state is of a different model: {min(names)} is in one of them only")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != state[name].shape:
                shapes = f"{list(state[name].shape)}, here {list(tensor.shape)}"
                raise ValueError(f"the saved state is of a different model: {name} has the shape {shapes}")
            tensor.detach().copy_(_like(state[name], tensor))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimiser's state dict with named parameters. Its tensors may be sharded."""
    reshard(model)
    names = _names(model)
    state = {names[id(parameter)]: dict(slots) for parameter, slots in _in_order(optimizer)}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimiser state of unsharded tensors on every rank. The number of ranks may have changed.

    Args:
        state: State with whole tensors by parameter name, on every rank.

    Raises:
        ValueError: The optimiser has different parameters.
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
