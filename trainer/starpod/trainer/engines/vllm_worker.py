"""Weights by CUDA IPC: the trainer's side, and what is added to vLLM's worker to receive them.

A handle names memory of another process on the same GPU. Only names, shapes and handles travel; the worker copies the
weights from GPU memory to GPU memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pack_handles(weights: Sequence[tuple[str, Tensor]]) -> bytes:
    """Handles of the weights, which have to be contiguous and to live until the worker is done with them."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps([(name, reduce_tensor(weight)) for name, weight in weights])  # type: ignore[no-untyped-call]


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `reload_weights` is the worker's own."""

    device: torch.device
    reload_weights: Any

    def starpod_receive(self, handles: bytes) -> None:
        """Loads the weights behind the handles, which come from this run's trainer alone."""
        place = self.device.index or 0

        def opened() -> Any:
            for name, (rebuild, arguments) in pickle.loads(handles):
                # The seventh argument is the GPU's number, which may differ between the two processes.
                yield name, rebuild(*arguments[:6], place, *arguments[7:])

        self.reload_weights(weights_iterator=opened())
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
