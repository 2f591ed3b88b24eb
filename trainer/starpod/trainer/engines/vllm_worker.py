"""Additions to vLLM's processes: the engine core gets its own session, and the worker receives weights by CUDA IPC.

A CUDA IPC handle refers to memory of another process on the same GPU. Only names, shapes and handles are sent, and the
worker copies the weights within GPU memory. Weights are sent in buckets, and the worker acknowledges each copied one.
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

from starpod.trainer.engines.weights import gather
from starpod.trainer.parallel.ranks import Parallel

BUCKET_BYTES = 2**29
"""Maximum size of a bucket. A larger weight has its own bucket."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIZE = struct.Struct("!Q")
_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


# --- the engine core --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_session() -> Iterator[None]:
    """Make engine cores that are started inside this context run `run_core`.

    Signals to the trainer's process group, such as Ctrl-C, then reach only the trainer, which saves and stops them.
    """
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
    """Run the engine core's program in its own session and kill it when the trainer ends for any reason."""
    os.setsid()
    # torchrun's variables are for the trainer. vLLM's own process group would look for torchrun's store.
    for name in [name for name in os.environ if name in _TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    # Ignoring a signal discards pending signals, which were meant for the trainer.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A forked process inherits the patched EngineCoreProc and the original. A spawned one imports it unpatched.
    run_engine_core: Callable[..., None] | None = getattr(run_core, "original", None)
    if run_engine_core is None:
        from vllm.v1.engine.core import EngineCoreProc

        run_engine_core = EngineCoreProc.run_engine_core
    run_engine_core(*arguments, **named)


def _end_with_parent() -> None:
    """Kill this process group when the parent ends. Otherwise the core of a killed trainer would keep its memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def only_gpus(device: torch.device, count: int) -> Iterator[None]:
    """Make engine cores that are started inside this context see only this GPU and the `count - 1` that follow it.

    Several ranks on a machine each have a core, and a core takes the first GPUs that it sees. This process has already
    initialized CUDA, so the variable does not change what it sees itself.
    """
    visible = os.environ.get(_VISIBLE)
    visible_gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    first = device.index or 0
    with environment_variable(_VISIBLE, ",".join(visible_gpus[first : first + count])):
        yield


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment inside this context, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


# --- weights ----------------------------------------------------------------------------------------------------------


def gpu_of(device: torch.device) -> str:
    """Return the GPU's UUID. Device numbers depend on the GPUs that a process sees, so they cannot be compared."""
    return str(torch.cuda.get_device_properties(device).uuid)


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights, made contiguous, in lists of at most BUCKET_BYTES."""
    bucket: list[tuple[str, Tensor]] = []
    for name, weight in weights:
        if bucket and sum(tensor.nbytes for _, tensor in bucket) + weight.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append((name, weight.contiguous()))
        del weight
    if bucket:
        yield bucket


def pack_handles(weights: Sequence[tuple[str, Tensor]]) -> bytes:
    """Pickle IPC handles of the weights. The weights must stay alive until the worker has copied them."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps([(name, reduce_tensor(weight)) for name, weight in weights])  # type: ignore[no-untyped-call]


@contextlib.asynccontextmanager
async def sent_by_handles(weights: Iterator[tuple[str, Tensor]], parallel: Parallel) -> AsyncIterator[str]:
    """Serve the weights inside the context and yield the socket address for the worker.

    Each bucket is sent after the worker has copied the previous one. If sending fails, the error is raised when the
    context ends. Weights of a sharded model are gathered in a thread. Even after an error, the remaining weights are
    gathered, because the other ranks wait for this one.
    """
    errors: list[Exception] = []
    connections: list[asyncio.StreamWriter] = []
    senders: list[asyncio.Task[Any]] = []

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        senders.extend([task] if (task := asyncio.current_task()) else ())
        weight_buckets = buckets(weights)
        try:
            while bucket := await parallel.in_thread(next, weight_buckets, None):
                torch.cuda.synchronize()
                handles = pack_handles(bucket)
                writer.write(_SIZE.pack(len(handles)) + handles)
                await reader.readexactly(1)
                bucket.clear()
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            writer.write(_SIZE.pack(0))
        except asyncio.IncompleteReadError:
            pass  # the worker failed and reports the error itself
        except Exception as error:
            errors.append(error)
        finally:
            writer.close()

    # The folder is private because the worker unpickles what it receives, which can run code.
    with tempfile.TemporaryDirectory(prefix="starpod-ipc-") as folder:
        server = await asyncio.start_unix_server(send, f"{folder}/handles")
        try:
            yield f"{folder}/handles"
        finally:
            server.close()
            for connection in connections:
                connection.close()
            await asyncio.gather(*senders, return_exceptions=True)
            if parallel.world > 1:
                await parallel.in_thread(gather, weights)
            if errors:
                raise errors[0]


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for vLLM's warning that some layers got no weights, if it is expected.

    It appears at each hand-over for rotary embeddings, which have a table, and for tied output layers, which use the
    embedding's weights.
    """
    return "Failed to load weights" not in str(record.msg) or not any(
        name in str(record.args) for name in ("RotaryEmbedding", "ParallelLMHead")
    )


# Takes effect when a worker imports this module, which is before it loads weights.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)


class WeightReceiver:
    """Mixin of vLLM's worker class (`worker_extension_cls`), which provides `reload_weights`."""

    device: torch.device
    reload_weights: Any

    def starpod_gpu(self) -> str:
        """Return the UUID of the worker's GPU."""
        return gpu_of(self.device)

    def starpod_receive(self, address: str) -> None:
        """Load the weights that the trainer serves at the socket address."""
        self.reload_weights(weights_iterator=self._opened(address))
        torch.cuda.synchronize()

    def _opened(self, address: str) -> Iterator[tuple[str, Tensor]]:
        gpu = self.device.index or 0
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(address)
            stream = channel.makefile("rb")
            while size := _SIZE.unpack(_read(stream, _SIZE.size))[0]:
                # Replace the seventh argument, the GPU's number, which may differ between the two processes.
                tensors = [
                    (name, rebuild(*arguments[:6], gpu, *arguments[7:]))
                    for name, (rebuild, arguments) in pickle.loads(_read(stream, size))
                ]
                for name, weight in tensors:
                    # Copy the weight, because vLLM keeps a layer's weights until it has all of them.
                    yield name, weight.clone()
                    del weight
                torch.cuda.synchronize()
                tensors.clear()
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                channel.sendall(b"+")


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the trainer sent no further weights")
    return data
