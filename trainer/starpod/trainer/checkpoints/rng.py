"""The random number generators of the process, as JSON values for a checkpoint."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """The states of torch (CPU and every GPU), numpy and python, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": _from_tensor(torch.get_rng_state()),
        "cuda": [_from_tensor(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [kind, _text(np.asarray(keys, dtype="<u4").tobytes()), position, has_gauss, cached],
        "python": [version, _text(struct.pack(f"<{len(words)}I", *words)), gauss],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Puts every generator where `capture_rng` found it. GPUs that are not there are left out."""
    torch.set_rng_state(_to_tensor(state["torch"]))
    for index, encoded in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_to_tensor(encoded), index)
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
