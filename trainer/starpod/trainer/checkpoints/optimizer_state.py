"""The state of an optimiser as named tensors and JSON values, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten_optimizer(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and what is not a tensor, for one optimiser's `state_dict()`.

    The parameters of the state dict may be numbered, as torch does it, or named, as `Parallel.optimizer_state` does.
    """
    tensors: dict[str, Tensor] = {}
    state: list[Any] = []
    for index, (parameter, slots) in enumerate(state_dict["state"].items()):
        state.append([parameter, {slot: _pack(tensors, f"{index}.{slot}", value) for slot, value in slots.items()}])
    groups = [
        {key: _pack(tensors, f"group.{index}.{key}", value) for key, value in group.items()}
        for index, group in enumerate(state_dict["param_groups"])
    ]
    return tensors, {"state": state, "param_groups": groups}


def unflatten_optimizer(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `flatten_optimizer` took, for `load_state_dict`."""
    return {
        "state": {
            parameter: {slot: _unpack(tensors, value) for slot, value in slots.items()}
            for parameter, slots in values["state"]
        },
        "param_groups": [
            {key: _unpack(tensors, value) for key, value in group.items()} for group in values["param_groups"]
        ],
    }


def _pack(tensors: dict[str, Tensor], name: str, value: Any) -> Any:
    """JSON has neither tensors nor tuples: they become an object that says so."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, tuple):
        return {"tuple": [_pack(tensors, f"{name}.{index}", item) for index, item in enumerate(value)]}
    return value


def _unpack(tensors: Mapping[str, Tensor], value: Any) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return tuple(_unpack(tensors, item) for item in value["tuple"])
    return value
