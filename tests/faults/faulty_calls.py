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

# Calls that the proxy adds have ids from here on: their replies are its own to drop.
OWN_IDS = 1 << 40


class FaultyCalls(pb_grpc.EnvironmentServiceServicer):
    """Forwards Describe and Stream to `upstream`, less than faithfully. `counts` tells what it did."""

    def __init__(self, upstream: str, seed: int) -> None:
        self.upstream = upstream
        self.address = ""
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._next_id = OWN_IDS

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
        upstream = self._stub.Stream()
        replies: asyncio.Queue[pb.StreamResponse | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.Lock()

        def spawn(coroutine: Any) -> None:
            task = asyncio.get_running_loop().create_task(coroutine)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def write(request: pb.StreamRequest, seconds: float) -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with writing:
                    await upstream.write(request)

        async def forward() -> None:
            async for request in requests:
                if self._random.random() < 0.2:
                    self.counts["doubled"] += len(request.calls) + len(request.steps.call_ids)
                    spawn(write(self._renumbered(request), self._random.choice([0.0, 0.01, 0.05])))
                await write(request, 0.0)

        async def send(response: pb.StreamResponse, seconds: float) -> None:
            await asyncio.sleep(seconds)
            replies.put_nowait(response)

        async def take() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while (response := await upstream.read()) is not grpc.aio.EOF:
                    luck = self._random.random()
                    response = _without_own(response)
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

        spawn(forward())
        spawn(take())
        try:
            while (response := await replies.get()) is not None:
                yield response
        finally:
            for task in tasks:
                task.cancel()
            upstream.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    def _renumbered(self, request: pb.StreamRequest) -> pb.StreamRequest:
        """The same calls under ids of our own."""
        copy = pb.StreamRequest()
        copy.CopyFrom(request)
        for call in copy.calls:
            call.call_id = self._own_id()
        copy.steps.call_ids[:] = [self._own_id() for _ in copy.steps.call_ids]
        return copy

    def _own_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _without_own(response: pb.StreamResponse) -> pb.StreamResponse:
    """Without the replies to calls that the client knows nothing of. What remains of columns goes as messages."""
    columns = response.transitions
    if all(call_id < OWN_IDS for call_id in columns.call_ids):
        if all(reply.call_id < OWN_IDS for reply in response.replies):
            return response
        kept = pb.StreamResponse()
        kept.transitions.CopyFrom(columns)
    else:
        kept = pb.StreamResponse()
        _copy_rows(columns, kept.transitions)
    kept.replies.extend(reply for reply in response.replies if reply.call_id < OWN_IDS)
    if not kept.transitions.call_ids:
        kept.ClearField("transitions")
    return kept


def _copy_rows(source: pb.TransitionColumns, target: pb.TransitionColumns) -> None:
    ends = dict(zip(source.ended_rows, zip(source.end_reasons, source.end_successes, strict=True), strict=True))
    counts = list(source.outcome_counts) or [1] * len(source.call_ids)
    start = 0
    for row, call_id in enumerate(source.call_ids):
        part = slice(start, start + counts[row])
        start = part.stop
        if call_id >= OWN_IDS:
            continue
        place = len(target.call_ids)
        target.call_ids.append(call_id)
        target.texts.append(source.texts[row])
        target.rewards.append(source.rewards[row])
        if source.state_keys:
            target.state_keys.append(source.state_keys[row])
        target.outcome_counts.append(counts[row])
        target.outcome_flags.extend(source.outcome_flags[part])
        shares = source.outcome_rewards[part] if source.outcome_rewards else [source.rewards[row]] * counts[row]
        target.outcome_rewards.extend(shares)
        if row in ends:
            target.ended_rows.append(place)
            target.end_reasons.append(ends[row][0])
            target.end_successes.append(ends[row][1])
