"""Files of tensors in the safetensors format that all ranks write together.

A sharded tensor is split by rows, and rows are contiguous in the file. Each rank writes its own rows, so nothing is
gathered, and the file is the same for any number of ranks.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.parallel.sharding import rows_of

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A copy in main memory of this rank's part of the tensors, and where to write it in the file."""

    header: bytes
    size: int
    """Size of the whole file in bytes."""
    parts: list[tuple[int, Tensor]]
    """This rank's rows, each with its offset in the file."""
    ties: dict[str, str]
    """For each tied tensor, the name of the stored tensor that it equals."""

    @classmethod
    def copied(cls, named: Mapping[str, Tensor], *, is_main: bool) -> TensorFile:
        """Copy this rank's rows, so that training may change the tensors. Only rank 0 stores tensors without shards."""
        stored_tensors, ties = _tie(named)
        # Larger types first, so that each tensor is aligned.
        order = sorted(stored_tensors, key=lambda name: (-stored_tensors[name].element_size(), name))
        entries: dict[str, Any] = {}
        chunks: list[tuple[int, Tensor]] = []
        end = 0
        for name in order:
            tensor = stored_tensors[name]
            begin, end = end, end + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape)
            entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
            rows, first_row = rows_of(tensor)
            if rows.numel() and (is_main or rows.shape != tensor.shape):
                row = (end - begin) // shape[0] if shape else 0
                chunks.append((begin + first_row * row, torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)))
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return cls(header, len(header) + end, [(len(header) + offset, rows) for offset, rows in chunks], ties)

    def create(self, path: Path) -> None:
        """Create the file with its header. The ranks then write their parts."""
        with open(path, "wb") as file:
            file.write(self.header)
            file.truncate(self.size)

    def write_parts(self, path: Path) -> None:
        """Write this rank's rows to disk."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for offset, rows in self.parts:
                data = rows.reshape(-1).view(torch.uint8).numpy().data
                while data:
                    count = os.pwrite(descriptor, data, offset)
                    data, offset = data[count:], offset + count
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _tie(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store, and for each tied tensor the name of the stored one that it equals."""
    stored_tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in named.items():
        rows, _ = rows_of(tensor)
        # Shards are compared by identity, because a rank may hold no row of them.
        address = (rows.device, rows.data_ptr(), rows.dtype, rows.shape, rows.stride())
        stored_name = (
            names.setdefault(address if rows.shape == tensor.shape else (id(tensor),), name) if tensor.numel() else name
        )
        if stored_name == name:
            stored_tensors[name] = tensor.detach() if rows.shape == tensor.shape else tensor
        else:
            ties[name] = stored_name
    return stored_tensors, ties
