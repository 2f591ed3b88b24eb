"""Measurements of WebShop's server by a client: start, memory, latency of a step, and steps per second."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time

import grpc

from benchmarks.machine import cpu_seconds
from benchmarks.serving.measure import summarise
from benchmarks.webshop.episodes import ENVIRONMENT, KINDS, NAME, OPTIONS, RESET, ShopEpisode, Waits
from starpod.client import Fleet, Limits, Session
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ServerProcess

SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the process to its ready line, and to the reply to the first Open. cpu: CPU seconds."""

    ready: float
    first_open: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Load:
    """Speed of all sessions together, including resets. Latencies are per batch, and CPU is in seconds per step."""

    steps_per_second: float
    p50: float
    p99: float
    client_cpu: float
    server_cpu: float


def serve(store: Path, *arguments: str) -> ServerProcess:
    """Start `starpod serve webshop` with one store."""
    command = [sys.executable, "-m", "starpod.cli.main", "serve", "webshop", "--store", f"{NAME}={store}"]
    return ServerProcess([*command, *arguments])


def private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other (USS), including such pages of the store's files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


async def start(store: Path) -> Start:
    """Measure the start of a server up to its first session."""
    start_time = perf_counter()
    server = serve(store)
    try:
        ready_seconds = perf_counter() - start_time
        async with grpc.aio.insecure_channel(server.address) as channel:
            await _open(EnvironmentServiceStub(channel))
        return Start(ready_seconds, perf_counter() - start_time, cpu_seconds(server.pid))
    finally:
        server.close()


async def endpoints_of(server: ServerProcess) -> list[str]:
    """Return the addresses of a server's workers."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        return list((await EnvironmentServiceStub(channel).Describe(pb.DescribeRequest())).endpoints)


async def one_by_one(address: str, warm_up: Sequence[ShopEpisode], episodes: Sequence[ShopEpisode]) -> Waits:
    """Measure the latencies of one session's steps, with one unary call each.

    Args:
        address: host:port of the server.
        warm_up: episodes that are played first and not measured.
        episodes: episodes whose steps are measured.
    """
    waits: Waits = {kind: [] for kind in (*KINDS, RESET)}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        session = await _open(stub)
        epoch = session.epoch
        for number, episode in enumerate((*warm_up, *episodes)):
            marks = [perf_counter()]
            reset = pb.ResetRequest(session_id=session.session_id, epoch=epoch, seed=episode.goal)
            epoch = (await stub.Reset(reset)).session.epoch
            marks.append(perf_counter())
            for index, action in enumerate(episode.actions):
                step = pb.StepRequest(
                    session_id=session.session_id, epoch=epoch, step_index=index, actions=[pb.Action(text=action)]
                )
                transition = (await stub.Step(step)).transition
                marks.append(perf_counter())
                episode.check(index, transition.reward, transition.terminated or transition.truncated)
            if number >= len(warm_up):
                for kind, start, end in zip((RESET, *episode.kinds), marks, marks[1:], strict=False):
                    waits[kind].append(end - start)
        await stub.Close(pb.CloseRequest(session_ids=[session.session_id]))
    return waits


async def _open(stub: EnvironmentServiceStub) -> pb.Session:
    request = pb.OpenRequest(environment_id=ENVIRONMENT, seed=0)
    request.options.update(OPTIONS)
    response: pb.OpenResponse = await stub.Open(request)  # type: ignore[misc]
    return response.sessions[0]


async def all_at_once(
    server: ServerProcess, episodes: Sequence[ShopEpisode], sessions: int, seconds: float, rounds: int, observation: str
) -> list[Load]:
    """Measure Fleet.step_many on two groups, each with half the sessions. Returns a measurement per round.

    Args:
        server: server with free room for the sessions.
        episodes: episodes to play, again and again.
        sessions: number of sessions.
        seconds: duration of a round.
        rounds: number of rounds, after one that is not measured.
        observation: format of the observations.
    """
    loads = []
    async with Fleet(server.address) as fleet:
        session_list = await fleet.open(
            ENVIRONMENT,
            count=sessions,
            seed=0,
            options={**OPTIONS, "observation": observation},
            limits=Limits(max_turns=0, max_actions_per_turn=0, max_actions=0),
        )
        source = cycle(episodes)
        groups = [Group(fleet, session_list[offset::2], source) for offset in range(2) if session_list[offset::2]]
        await asyncio.gather(*(group.march(SETTLE_SECONDS) for group in groups))
        for _ in range(rounds):
            client_cpu, server_cpu, start = process_time(), cpu_seconds(server.pid), perf_counter()
            waits = await asyncio.gather(*(group.march(seconds) for group in groups))
            elapsed = perf_counter() - start
            steps = sum(len(times) * len(group.sessions) for times, group in zip(waits, groups, strict=True))
            summary = summarise(steps, elapsed, [wait for times in waits for wait in times])
            loads.append(
                Load(
                    summary.rate,
                    summary.p50,
                    summary.p99,
                    (process_time() - client_cpu) / steps,
                    (cpu_seconds(server.pid) - server_cpu) / steps,
                )
            )
    return loads


class Group:
    """Sessions that step together. Those whose episode has ended are reset first. source: the episodes to play."""

    def __init__(self, fleet: Fleet, sessions: Sequence[Session], source: Iterator[ShopEpisode]) -> None:
        self.sessions = sessions
        self._fleet = fleet
        self._source = source
        self._played = [next(source) for _ in sessions]
        self._places = [0] * len(sessions)
        # The first episodes have different lengths, because otherwise all sessions would search at the same time.
        self._ends = [1 + index % len(episode.actions) for index, episode in enumerate(self._played)]
        self._over = list(range(len(sessions)))

    async def march(self, seconds: float) -> list[float]:
        """Step all sessions for a while. Returns the latency of each batch."""
        waits: list[float] = []
        end = perf_counter() + seconds
        while True:
            await asyncio.gather(*(self.sessions[row].reset(seed=self._played[row].goal) for row in self._over))
            before = perf_counter()
            turns = [episode.actions[index] for episode, index in zip(self._played, self._places, strict=True)]
            transitions = await self._fleet.step_many(self.sessions, turns)
            after = perf_counter()
            waits.append(after - before)
            for episode, index, transition in zip(self._played, self._places, transitions, strict=True):
                episode.check(index, transition.reward, transition.done)
            self._move_on()
            if after >= end:
                return waits

    def _move_on(self) -> None:
        self._places = [index + 1 for index in self._places]
        self._over = [
            row for row, (index, end) in enumerate(zip(self._places, self._ends, strict=True)) if index == end
        ]
        for row in self._over:
            self._played[row] = episode = next(self._source)
            self._places[row], self._ends[row] = 0, len(episode.actions)
