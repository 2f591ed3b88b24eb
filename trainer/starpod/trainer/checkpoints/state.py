"""Lossless conversion of optimiser and random states to named tensors and JSON values, and back."""

from __future__ import annotations

import base64
import random
import struct
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# --- optimiser --------------------------------------------------------------------------------------------------------


def flatten_optimizer(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimiser's `state_dict()` into tensors by name and JSON values.

    Parameters may be numbered, as in torch, or named, as in `Parallel.optimizer_state`.
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
    """Return the state dict that was passed to `flatten_optimizer`."""
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
    """Replace tensors and tuples, which JSON cannot represent, with marked objects."""
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


# --- tensors of several parts -----------------------------------------------------------------------------------------


def join_parts(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all parts in one mapping, where they are named `<part>.<name>`. Part names have no dot."""
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def split_parts(tensors: Mapping[str, Tensor]) -> defaultdict[str, dict[str, Tensor]]:
    """Split the result of `join_parts` again. A part without tensors is empty."""
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for full_name, tensor in tensors.items():
        part, _, name = full_name.partition(".")
        parts[part][name] = tensor
    return parts


def join_agents(parts: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return all policies' tensors in one mapping. The tensors of the only policy, named "", keep their names."""
    return parts[""] if "" in parts else join_parts(parts)


def split_agents(tensors: Mapping[str, Tensor], agents: Container[str]) -> Mapping[str, Mapping[str, Tensor]]:
    """Split the result of `join_agents` again."""
    return {"": tensors} if "" in agents else split_parts(tensors)


# --- random number generators -----------------------------------------------------------------------------------------


def capture_rng() -> dict[str, Any]:
    """Return the states of torch (CPU and every GPU), numpy and Python as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": _from_tensor(torch.get_rng_state()),
        "cuda": [_from_tensor(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [kind, _text(np.asarray(keys, dtype="<u4").tobytes()), position, has_gauss, cached],
        "python": [version, _text(struct.pack(f"<{len(words)}I", *words)), gauss],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the generators from `capture_rng`. States of GPUs that do not exist here are skipped."""
    torch.set_rng_state(_to_tensor(state["torch"]))
    for index, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_to_tensor(cuda_state), index)
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(word for (word,) in struct.iter_unpack("<I", base64.b64decode(words))), gauss))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_tensor(state: torch.Tensor) -> str:
    return _text(state.numpy().tobytes())


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
