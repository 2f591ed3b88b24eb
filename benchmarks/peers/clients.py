"""Sessions on the peers' servers, driven by the clients in the peers' own packages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import grpc
from dm_env_rpc.v1 import dm_env_rpc_pb2 as dm
from dm_env_rpc.v1.async_connection import AsyncConnection
from dm_env_rpc.v1.connection import Connection
from dm_env_rpc.v1.dm_env_adaptor import DmEnvAdaptor, create_and_join_world
from dm_env_rpc.v1.tensor_utils import pack_tensor, unpack_tensor
from openenv.core.generic_client import GenericEnvClient

from benchmarks.peers.dm_env_rpc_server import ACTION_UID, REWARD_UID, TEXT_UID
from benchmarks.serving.lake import TASK, actions_of_episode, next_seed
from benchmarks.serving.measure import Measurement, Run, check, drive, summarise
from starpod.environments.frozen_lake import ACTIONS

CONNECTS_AT_ONCE = 32


class OpenEnvPlayer:
    """A session of OpenEnv: one WebSocket."""

    def __init__(self, client: GenericEnvClient) -> None:
        self._client = client

    async def step(self, action: str) -> tuple[float, bool]:
        result = await self._client.step({"name": action})
        return result.reward or 0.0, result.done

    async def reset(self) -> None:
        await self._client.reset(seed=next_seed())


class DmEnvRpcPlayer:
    """A session of dm_env_rpc: one stream. A new episode starts with a step whose action is ignored."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._over = False

    async def step(self, action: str) -> tuple[float, bool]:
        tensor = pack_tensor(ACTIONS.index(action), dtype=dm.DataType.INT64)
        request = dm.StepRequest(requested_observations=[TEXT_UID, REWARD_UID], actions={ACTION_UID: tensor})
        response = await self._connection.send(request)
        unpack_tensor(response.observations[TEXT_UID])
        reward = float(unpack_tensor(response.observations[REWARD_UID]))
        self._over = response.state == dm.EnvironmentStateType.TERMINATED
        return reward, self._over

    async def reset(self) -> None:
        if not (TASK.random and self._over):  # else the next step begins another sequence
            await self._connection.send(dm.ResetRequest())
        await self._connection.send(dm.StepRequest(requested_observations=[TEXT_UID]))


@contextlib.asynccontextmanager
async def open_openenv(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open one WebSocket per session, because a connection of OpenEnv is a session."""
    gate = asyncio.Semaphore(CONNECTS_AT_ONCE)
    clients: list[GenericEnvClient] = []

    async def connect() -> None:
        async with gate:
            client = GenericEnvClient(base_url=f"http://{address}")
            await client.connect()
            clients.append(client)

    try:
        await asyncio.gather(*(connect() for _ in range(sessions)))
        players = [OpenEnvPlayer(client) for client in clients]
        yield lambda seconds: drive(players, seconds)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


@contextlib.asynccontextmanager
async def open_dm_env(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open a blocking connection per session, each in its own thread, like the agent of dm_env_rpc's catch example."""
    pool = ThreadPoolExecutor(sessions)
    loop = asyncio.get_running_loop()

    async def together(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*(loop.run_in_executor(pool, function, argument) for argument in arguments))

    def join(_: int) -> DmEnvAdaptor:
        connection = Connection(grpc.insecure_channel(address))
        return create_and_join_world(connection, create_world_settings={}, join_world_settings={}).env

    environments = await together(join, range(sessions))

    async def run(seconds: float) -> Measurement:
        await together(DmEnvAdaptor.reset, environments)
        barrier = threading.Barrier(sessions + 1)
        waits: list[float] = []
        resets = 0

        def play(environment: DmEnvAdaptor) -> None:
            barrier.wait()
            start = perf_counter()
            nonlocal resets
            while True:
                for number, action in enumerate(actions_of_episode(), 1):
                    before = perf_counter()
                    step = environment.step({"action": ACTIONS.index(action)})
                    after = perf_counter()
                    waits.append(after - before)
                    check(number, float(step.reward), step.last())
                    if after - start >= seconds:
                        return
                    if step.last():
                        break
                environment.reset()
                resets += TASK.random

        task = asyncio.create_task(together(play, environments))
        await asyncio.to_thread(barrier.wait)
        start = perf_counter()
        await task
        return summarise(len(waits) + resets, perf_counter() - start, waits)

    try:
        yield run
    finally:
        await together(DmEnvAdaptor.close, environments)
        pool.shutdown()


@contextlib.asynccontextmanager
async def open_dm_env_rpc(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open one stream per session over a single connection, in one event loop."""
    async with grpc.aio.insecure_channel(address) as channel:
        connections = [AsyncConnection(channel) for _ in range(sessions)]

        async def join(connection: Any) -> None:
            await connection.send(dm.CreateWorldRequest())
            await connection.send(dm.JoinWorldRequest(world_name="lake"))

        await asyncio.gather(*map(join, connections))
        players = [DmEnvRpcPlayer(connection) for connection in connections]
        yield lambda seconds: drive(players, seconds)
