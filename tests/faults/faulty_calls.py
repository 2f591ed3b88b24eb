"""A proxy between client and server that doubles, delays, reorders and loses calls, and cuts streams."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc


class FaultyCalls(pb_grpc.EnvironmentServiceServicer):
    """A proxy that forwards Describe and Stream to `upstream` with faults. `counts` counts them.

    Doubled calls go over a second stream, whose replies are thrown away.
    """

    def __init__(self, upstream: str, seed: int) -> None:
        self.upstream = upstream
        self.address = ""
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)

    async def __aenter__(self) -> "FaultyCalls":
        self._channel = grpc.aio.insecure_channel(
            self.upstream,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 100),
            ],
        )
        self._stub = pb_grpc.EnvironmentServiceStub(self._channel)
        self._server = grpc.aio.server()
        pb_grpc.add_EnvironmentServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802 - gRPC's name
        try:
            response: pb.DescribeResponse = await self._stub.Describe(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.details() or "")
        response.ClearField("endpoints")
        return response

    async def Stream(self, requests: AsyncIterator[pb.StreamRequest], context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802
        upstream, doubles = self._stub.Stream(), self._stub.Stream()
        replies: asyncio.Queue[pb.StreamResponse | None] = asyncio.Queue()
        writing = {stream: asyncio.Lock() for stream in (upstream, doubles)}
        broken = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
        tasks: set[asyncio.Task[None]] = set()

        def spawn(coroutine: Any) -> None:
            task = asyncio.get_running_loop().create_task(coroutine)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def write(stream: Any, request: pb.StreamRequest, seconds: float) -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(*broken):
                async with writing[stream]:
                    await stream.write(request)

        async def forward() -> None:
            async for request in requests:
                if self._random.random() < 0.2:
                    self.counts["doubled"] += len(request.calls) + len(request.steps.call_ids)
                    spawn(write(doubles, request, self._random.choice([0.0, 0.01, 0.05])))
                await write(upstream, request, 0.0)

        async def throw_away() -> None:
            with contextlib.suppress(*broken):
                while await doubles.read() is not grpc.aio.EOF:
                    pass

        async def send(response: pb.StreamResponse, seconds: float) -> None:
            await asyncio.sleep(seconds)
            replies.put_nowait(response)

        async def take() -> None:
            with contextlib.suppress(*broken):
                while (response := await upstream.read()) is not grpc.aio.EOF:
                    luck = self._random.random()
                    size = len(response.replies) + len(response.transitions.call_ids)
                    if luck < 0.01:
                        self.counts["lost"] += size
                    elif luck < 0.02:
                        self.counts["cut"] += 1
                        break
                    elif luck < 0.3:
                        self.counts["delayed"] += size
                        spawn(send(response, self._random.uniform(0.0, 0.05)))
                    else:
                        replies.put_nowait(response)
            replies.put_nowait(None)

        for work in (forward(), take(), throw_away()):
            spawn(work)
        try:
            while (response := await replies.get()) is not None:
                yield response
        finally:
            for task in tasks:
                task.cancel()
            upstream.cancel()
            doubles.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
