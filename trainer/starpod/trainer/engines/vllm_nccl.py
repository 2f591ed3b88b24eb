"""Broadcast of a policy's weights to vLLM servers over NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from starpod.trainer.engines.base import EngineError
from starpod.trainer.engines.vllm_server import VllmServer, read_world_size
from starpod.trainer.engines.weights import device_of, shapes_of, weights_of
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.parallel.ranks import Parallel


class NcclSender:
    """Broadcasts weights from the trainer's GPU to the servers' GPUs, one parameter at a time.

    The first call creates a process group in which the trainer is rank 0 and the servers' workers are the other ranks.
    The servers reach the trainer at `address` ("host:port"). The trainer needs vllm, for its communicator, and a policy
    on a GPU.
    """

    def __init__(self, servers: list[VllmServer], address: str, parallel: Parallel) -> None:
        self._servers = servers
        self._parallel = parallel
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._group: Any = None

    async def send(self, model: torch.nn.Module) -> None:
        """Send the weights and return when all servers have them. Raises EngineError."""
        device = device_of(model)
        if device.type != "cuda":
            raise EngineError("engine.handover nccl sends from the policy's GPU memory, but the policy is on the CPU")
        if self._group is None:
            self._group = await self._join(device)
        names, shapes = zip(*shapes_of(model), strict=True)
        types = [str(compute_dtype(model)).removeprefix("torch.")] * len(names)
        update = {"update_info": {"names": list(names), "dtype_names": types, "shapes": list(shapes)}}
        await asyncio.gather(*(server.post("/start_weight_update", once=True) for server in self._servers))
        # These calls return only after the broadcast.
        calls = [asyncio.ensure_future(server.post("/update_weights", update, once=True)) for server in self._servers]
        await self._together(calls, self._parallel.in_thread(self._broadcast, model, device))
        await asyncio.gather(*(server.post("/finish_weight_update", once=True) for server in self._servers))

    async def _join(self, device: torch.device) -> Any:
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            hint = "from a clone of the repository: pip install '.[vllm]'"
            raise EngineError(f"engine.handover nccl needs vllm here; {hint} ({error})") from None
        sizes = [await server.get("/get_world_size", read_world_size) for server in self._servers]
        world = 1 + sum(sizes)

        def rendezvous() -> Any:
            group = StatelessProcessGroup.create(host=self._host, port=self._port, rank=0, world_size=world)
            return PyNcclCommunicator(group, device=device)

        calls, rank = [], 1
        for server, size in zip(self._servers, sizes, strict=True):
            info = {"master_address": self._host, "master_port": self._port, "rank_offset": rank, "world_size": world}
            call = server.post("/init_weight_transfer_engine", {"init_info": info}, once=True)
            calls.append(asyncio.ensure_future(call))
            rank += size
        return await self._together(calls, self._parallel.in_thread(rendezvous))

    async def _together(self, calls: Sequence[asyncio.Future[Any]], work: Any) -> Any:
        """Run the servers' calls and the trainer's part of a collective operation at the same time.

        Errors of the servers are raised at once, because the trainer's part would hang without them.
        """
        own_call = asyncio.ensure_future(work)
        done, _ = await asyncio.wait((*calls, own_call), return_when=asyncio.FIRST_EXCEPTION)
        for call in {*calls, own_call} - done:
            call.cancel()
        for call in (*calls, own_call):
            if call in done and (error := call.exception()) is not None:
                raise error
        return own_call.result()

    def _broadcast(self, model: torch.nn.Module, device: torch.device) -> None:
        # Use the stream that computes the weights, or they could be sent before they are complete.
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            for _, weight in weights_of(model):
                self._group.broadcast(weight.contiguous(), src=0, stream=stream)
            torch.cuda.synchronize()
