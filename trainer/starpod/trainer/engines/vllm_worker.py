"""Additions to vLLM's processes: a session of their own for the engine core, and weights by CUDA IPC for its worker.

A handle names memory of another process on the same GPU. Only names, shapes and handles travel; the worker copies the
weights from GPU memory to GPU memory. They come in buckets: the worker asks for the next one when it has copied one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

BUCKET_BYTES = 2**29
"""Of the weights that are on their way at once; one that is larger comes alone."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIZE = struct.Struct("!Q")


# --- the engine core --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_session() -> Iterator[None]:
    """Engine cores that are begun meanwhile run by `run_core`: signals to the trainer's process group, such as Ctrl-C,
    are for the trainer, which saves and ends them."""
    from vllm.v1.engine.core import EngineCoreProc

    run_core.original = EngineCoreProc.run_engine_core  # type: ignore[attr-defined]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    EngineCoreProc.run_engine_core = staticmethod(run_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(run_core.original)  # type: ignore[attr-defined]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_core(*arguments: Any, **named: Any) -> None:
    """The engine core's program, in a session of its own, which ends with the trainer, however that ends."""
    os.setsid()
    # What came before is dropped: it was for the trainer.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A forked process has the parent's memory, with the other program in the place of vLLM's.
    original: Callable[..., None] | None = getattr(run_core, "original", None)
    if original is None:
        from vllm.v1.engine.core import EngineCoreProc

        original = EngineCoreProc.run_engine_core
    original(*arguments, **named)


def _end_with_parent() -> None:
    """Kills this process and its own: a core whose trainer was killed would keep its memory for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


# --- weights ----------------------------------------------------------------------------------------------------------


def gpu_of(device: torch.device) -> str:
    """The GPU's UUID: numbers differ between processes that see other GPUs."""
    return str(torch.cuda.get_device_properties(device).uuid)


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights, contiguous, in lists of at most BUCKET_BYTES."""
    bucket: list[tuple[str, Tensor]] = []
    for name, weight in weights:
        if bucket and sum(each.nbytes for _, each in bucket) + weight.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append((name, weight.contiguous()))
        del weight
    if bucket:
        yield bucket


def pack_handles(weights: Sequence[tuple[str, Tensor]]) -> bytes:
    """Handles of the weights, which have to live until the worker is done with them."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps([(name, reduce_tensor(weight)) for name, weight in weights])  # type: ignore[no-untyped-call]


@contextlib.asynccontextmanager
async def sent_by_handles(weights: Iterable[tuple[str, Tensor]]) -> AsyncIterator[str]:
    """The address at which a worker gets the weights, a bucket whenever it has copied the one before.

    Raises what goes wrong in sending them.
    """
    failed: list[Exception] = []
    connections: list[asyncio.StreamWriter] = []

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        try:
            for bucket in buckets(weights):
                torch.cuda.synchronize()
                handles = pack_handles(bucket)
                writer.write(_SIZE.pack(len(handles)) + handles)
                await reader.readexactly(1)
                bucket.clear()
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            writer.write(_SIZE.pack(0))
        except asyncio.IncompleteReadError:
            pass  # the worker failed, and says so itself
        except Exception as error:
            failed.append(error)
        finally:
            writer.close()

    # Private, as what is sent could run code.
    with tempfile.TemporaryDirectory(prefix="starpod-ipc-") as folder:
        server = await asyncio.start_unix_server(send, f"{folder}/handles")
        try:
            yield f"{folder}/handles"
        finally:
            server.close()
            for connection in connections:
                connection.close()
            if failed:
                raise failed[0]


def _is_news(record: logging.LogRecord) -> bool:
    """False for vLLM's warning, at each hand-over, that layers without weights of their own got none: a rotary
    embedding has a table, a tied output layer the embedding's weights."""
    return "Failed to load weights" not in str(record.msg) or not any(
        name in str(record.args) for name in ("RotaryEmbedding", "ParallelLMHead")
    )


# Where this module is imported in a worker, which is before it loads weights.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `reload_weights` is the worker's own."""

    device: torch.device
    reload_weights: Any

    def starpod_gpu(self) -> str:
        """The worker's GPU, as `gpu_of`."""
        return gpu_of(self.device)

    def starpod_receive(self, address: str) -> None:
        """Loads the weights that this run's trainer sends at the address."""
        self.reload_weights(weights_iterator=self._opened(address))
        torch.cuda.synchronize()

    def _opened(self, address: str) -> Iterator[tuple[str, Tensor]]:
        place = self.device.index or 0
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(address)
            stream = channel.makefile("rb")
            while size := _SIZE.unpack(_read(stream, _SIZE.size))[0]:
                # The seventh argument is the GPU's number, which may differ between the two processes.
                opened = [
                    (name, rebuild(*arguments[:6], place, *arguments[7:]))
                    for name, (rebuild, arguments) in pickle.loads(_read(stream, size))
                ]
                for name, weight in opened:
                    # A copy: vLLM keeps the weights of a layer until it has all of them.
                    yield name, weight.clone()
                    del weight
                torch.cuda.synchronize()
                opened.clear()
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                channel.sendall(b"+")


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the trainer sent no further weights")
    return data
