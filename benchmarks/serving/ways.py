"""Ways of stepping the lake: in this process, over Starpod's wire, and over the peers' wires."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import grpc

from benchmarks.serving.lake import CHOSEN, ENVIRONMENT, OPTIONS, TASK, WALK, actions_of_episode, new_episode, next_seed
from benchmarks.serving.measure import Measurement, Run, check, drive, summarise
from starpod.client import Fleet, Limits, Session
from starpod.env_server.episodes.live_episode import Want
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ROOT

MOST_IN_A_GROUP = 1024
UNLIMITED = pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=0)


@dataclass(frozen=True, slots=True)
class SteppingMethod:
    """A way of stepping.

    server: kind of server at `address`: starpod, starpod_2 (two workers), starpod_endless (a lake without limits),
    openenv, openenv_tuned, dm_env_rpc, or none. open: opens a number of sessions. most: maximum number of sessions, for
    ways that need a process, a connection or a thread for each.
    """

    name: str
    server: str
    open: Callable[[str, int], AbstractAsyncContextManager[Run]]
    most: int = 1_000_000


# --- in process --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_in_process(address: str, sessions: int) -> AsyncIterator[Run]:
    """Step all episodes in one loop in this process, which is the upper bound of every other way."""
    episodes = [new_episode() for _ in range(sessions)]
    want = Want()

    async def run_at_random(seconds: float) -> Measurement:
        waits: list[float] = []
        moves, start = actions_of_episode(), perf_counter()
        while (before := perf_counter()) - start < seconds:
            for episode in episodes:
                if episode.end_reason:
                    episode.reset(next_seed(), 0)
                else:
                    episode.turn([next(moves)], want)
            waits.append((perf_counter() - before) / sessions)
        return summarise(sessions * len(waits), perf_counter() - start, waits)

    async def run(seconds: float) -> Measurement:
        for episode in episodes:
            episode.reset(0, 0)
        waits: list[float] = []
        start = perf_counter()
        while True:
            for number, action in enumerate(WALK, 1):
                before = perf_counter()
                actions = [action]
                transitions = [episode.turn(actions, want) for episode in episodes]
                after = perf_counter()
                waits.append((after - before) / sessions)
                check(number, transitions[-1].reward, bool(transitions[-1].end_reason))
                if after - start >= seconds:
                    return summarise(sessions * len(waits), after - start, waits)
            for episode in episodes:
                episode.reset(0, 0)

    yield run_at_random if TASK.random else run


# --- Starpod -----------------------------------------------------------------------------------------------------


class UnaryPlayer:
    """A session with one unary call per step."""

    def __init__(self, stub: EnvironmentServiceStub, session: pb.Session) -> None:
        self._stub = stub
        self._id = session.session_id
        self._epoch, self._index = session.epoch, session.step_index

    async def step(self, action: str) -> tuple[float, bool]:
        request = pb.StepRequest(
            session_id=self._id, epoch=self._epoch, step_index=self._index, actions=[pb.Action(text=action)]
        )
        response = await self._stub.Step(request)
        self._index = response.next_step_index
        transition = response.transition
        return transition.reward, transition.terminated or transition.truncated

    async def reset(self) -> None:
        response = await self._stub.Reset(pb.ResetRequest(session_id=self._id, epoch=self._epoch, seed=0))
        self._epoch, self._index = response.session.epoch, response.session.step_index


class SessionPlayer:
    """A session of a fleet, stepped with Session.step."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def step(self, action: str) -> tuple[float, bool]:
        transition = await self._session.step(action)
        return transition.reward, transition.done

    async def reset(self) -> None:
        await self._session.reset(seed=next_seed())


@contextlib.asynccontextmanager
async def open_unary(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open sessions with one unary call per step and one coroutine per session."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        session_list = await _open(stub, sessions)
        players = [UnaryPlayer(stub, session) for session in session_list]
        yield lambda seconds: drive(players, seconds)
        await stub.Close(pb.CloseRequest(session_ids=[session.session_id for session in session_list]))


@contextlib.asynccontextmanager
async def open_blocking_unary(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open a session with one unary call per step by gRPC's blocking client, as in a script without an event loop."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = EnvironmentServiceStub(channel)
        request = pb.OpenRequest(environment_id=ENVIRONMENT, seed=0, count=sessions, limits=UNLIMITED)
        request.options.update(OPTIONS)
        (session,) = stub.Open(request).sessions
        epoch = session.epoch

        async def reset() -> None:
            nonlocal epoch
            epoch = stub.Reset(pb.ResetRequest(session_id=session.session_id, epoch=epoch, seed=0)).session.epoch

        async def step(place: int, action: str) -> None:
            request = pb.StepRequest(
                session_id=session.session_id, epoch=epoch, step_index=place - 1, actions=[pb.Action(text=action)]
            )
            transition = stub.Step(request).transition
            check(place, transition.reward, transition.terminated or transition.truncated)

        yield lambda seconds: _march(sessions, seconds, reset, step)
        stub.Close(pb.CloseRequest(session_ids=[session.session_id]))


@contextlib.asynccontextmanager
async def open_stream_calls(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open sessions stepped in batches without columns, as any client can do with only the generated messages."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        session_list = await _open(stub, sessions)
        stream = stub.Stream()
        ids = [session.session_id for session in session_list]
        epoch = 1

        async def exchange(calls: list[pb.Call]) -> list[pb.Reply]:
            await stream.write(pb.StreamRequest(calls=calls))
            replies: list[pb.Reply] = []
            while len(replies) < len(calls):
                replies += (await stream.read()).replies
            return replies

        async def reset() -> None:
            nonlocal epoch
            await exchange(
                [
                    pb.Call(call_id=row, reset=pb.ResetRequest(session_id=session_id, epoch=epoch, seed=0))
                    for row, session_id in enumerate(ids)
                ]
            )
            epoch += 1

        async def step(place: int, action: str) -> None:
            actions = [pb.Action(text=action)]
            replies = await exchange(
                [
                    pb.Call(
                        call_id=row,
                        step=pb.StepRequest(session_id=session_id, epoch=epoch, step_index=place - 1, actions=actions),
                    )
                    for row, session_id in enumerate(ids)
                ]
            )
            for reply in replies:
                transition = reply.step.transition
                check(place, transition.reward, transition.terminated or transition.truncated)

        yield lambda seconds: _march(sessions, seconds, reset, step)
        await stream.done_writing()
        await stub.Close(pb.CloseRequest(session_ids=ids))


@contextlib.asynccontextmanager
async def open_step_many(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open sessions stepped by Fleet.step_many, in columns over one Stream.

    Each server has two independent groups, like the groups of a trainer: it steps one while the client reads the
    replies to the other.
    """
    async with Fleet(address) as fleet:
        by_address: defaultdict[str, list[Session]] = defaultdict(list)
        for session in await _open_fleet(fleet, sessions):
            by_address[session.address].append(session)
        groups = [group for members in by_address.values() for group in (members[::2], members[1::2]) if group]

        async def march(group: list[Session], seconds: float) -> Measurement:
            async def reset() -> None:
                await fleet.reset_many(group, [0] * len(group))

            if TASK.random:
                return await _march_at_random(fleet, group, seconds)

            async def step(place: int, action: str) -> None:
                for transition in await fleet.step_many(group, [action] * len(group)):
                    check(place, transition.reward, transition.done)

            return await _march(len(group), seconds, reset, step)

        async def run(seconds: float) -> Measurement:
            parts = await asyncio.gather(*(march(group, seconds) for group in groups))
            return Measurement(
                sum(part.steps for part in parts),
                max(part.seconds for part in parts),
                max(part.p50 for part in parts),
                max(part.p99 for part in parts),
            )

        yield run


@contextlib.asynccontextmanager
async def open_coroutines(address: str, sessions: int) -> AsyncIterator[Run]:
    """Open sessions with one coroutine each over one Stream. The fleet batches the calls that are ready."""
    async with Fleet(address) as fleet:
        players = [SessionPlayer(session) for session in await _open_fleet(fleet, sessions)]
        yield lambda seconds: drive(players, seconds)


@contextlib.asynccontextmanager
async def open_load(address: str, sessions: int) -> AsyncIterator[Run]:
    """Run `starpod load` as a separate process: a closed loop of the same walk on the same lake, without limits."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        head = {"format": "starpod-load-recording", "version": 1, "environment": "", "episodes": 1}
        lines = (head, {"seed": 0, "turns": [[action] for action in WALK]})
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        yield _load([address, "--policy", f"recorded:{file.name}", "--sessions", str(sessions)], OPTIONS)


@contextlib.asynccontextmanager
async def open_default_load(address: str, sessions: int) -> AsyncIterator[Run]:
    """Run `starpod load` with its default policy, random moves, on a lake without holes.

    Episodes there are about as long as the walk of the other ways, so that the number of resets is similar. If the task
    is random, run it on the real lake, as docs/load.md does.
    """
    if TASK.random:
        yield _load([address, "--sessions", str(sessions)], {}, ENVIRONMENT)
        return
    yield _load([address, "--sessions", str(sessions)], {**OPTIONS, "map": ["SFFF", "FFFF", "FFFF", "FFFG"]})


def _load(arguments: Sequence[str], options: Mapping[str, Any], environment: str = "endless_lake") -> Run:
    words = ["-e", environment, *arguments]
    words += [word for name, value in options.items() for word in ("--option", f"{name}={json.dumps(value)}")]

    async def run(seconds: float) -> Measurement:
        length = str(max(seconds, 1.0))  # on a busy machine, a shorter run may end before its first step
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "starpod.cli.main", "load", "--seconds", length, *words, "--json", "-"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=ROOT,
        )
        output, _ = await process.communicate()
        (stage,) = json.loads(output)["stages"]
        calls, (generator,) = stage["calls"], stage["generators"]
        step = calls["step"]
        return Measurement(
            stage["steps"] + (calls["reset"]["count"] if TASK.random else 0),
            stage["seconds"],
            step["p50_ms"] / 1e3,
            step["p99_ms"] / 1e3,
            client_cpu=generator["process_cpu_share"] * stage["seconds"],
        )

    return run


async def _march_at_random(fleet: Fleet, group: list[Session], seconds: float) -> Measurement:
    """Step all sessions together, and reset together those whose episodes have ended. Both are counted."""
    await fleet.reset_many(group, [next_seed() for _ in group])
    waits: list[float] = []
    resets, start = 0, perf_counter()
    moves = actions_of_episode()
    while (before := perf_counter()) - start < seconds:
        transitions = await fleet.step_many(group, list(islice(moves, len(group))))
        waits.append(perf_counter() - before)
        ended = [session for session, transition in zip(group, transitions, strict=True) if transition.done]
        await fleet.reset_many(ended, [next_seed() for _ in ended])
        resets += len(ended)
    return summarise(len(group) * len(waits) + resets, perf_counter() - start, waits)


async def _march(
    sessions: int, seconds: float, reset: Callable[[], Awaitable[None]], step: Callable[[int, str], Awaitable[None]]
) -> Measurement:
    """Step all sessions together. A step's latency is its batch's latency; the first resets are not timed."""
    await reset()
    waits: list[float] = []
    start = perf_counter()
    while True:
        for number, action in enumerate(WALK, 1):
            before = perf_counter()
            await step(number, action)
            after = perf_counter()
            waits.append(after - before)
            if after - start >= seconds:
                return summarise(sessions * len(waits), after - start, waits)
        await reset()


async def _open(stub: EnvironmentServiceStub, sessions: int) -> Sequence[pb.Session]:
    request = pb.OpenRequest(environment_id=ENVIRONMENT, seed=0, count=sessions, limits=UNLIMITED)
    request.options.update(OPTIONS)
    return (await stub.Open(request)).sessions


async def _open_fleet(fleet: Fleet, sessions: int) -> list[Session]:
    """Open sessions in at least two groups, so that two servers get half of them each."""
    session_list: list[Session] = []
    while (missing_count := sessions - len(session_list)) > 0:
        session_list += await fleet.open(
            ENVIRONMENT,
            count=min(missing_count, (sessions + 1) // 2, MOST_IN_A_GROUP),
            seed=0,
            options=OPTIONS,
            limits=None if TASK.random else Limits(max_turns=0, max_actions_per_turn=0, max_actions=0),
        )
    return session_list


@contextlib.asynccontextmanager
async def open_empty_calls(address: str, sessions: int) -> AsyncIterator[Run]:
    """Call Renew without a session, with one call in flight per "session": the cost of a call in gRPC itself."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        request = pb.RenewRequest()

        async def run(seconds: float) -> Measurement:
            waits: list[float] = []
            start = perf_counter()

            async def call() -> None:
                while (before := perf_counter()) - start < seconds:
                    await stub.Renew(request)
                    waits.append(perf_counter() - before)

            await asyncio.gather(*(call() for _ in range(sessions)))
            return summarise(len(waits), perf_counter() - start, waits)

        yield run


# --- the peers ---------------------------------------------------------------------------------------------------


def _peer(name: str) -> Callable[[str, int], AbstractAsyncContextManager[Run]]:
    @contextlib.asynccontextmanager
    async def open_peer(address: str, sessions: int) -> AsyncIterator[Run]:
        from benchmarks.peers import clients  # needs the peers' packages

        async with getattr(clients, name)(address, sessions) as run:
            yield run

    return open_peer


@contextlib.asynccontextmanager
async def _driver(module: str, *arguments: str) -> AsyncIterator[Run]:
    """Run a program that steps its own environments: it reads a number of seconds and prints a measurement as JSON."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    async def run(seconds: float) -> Measurement:
        stdin.write(f"{seconds}\n".encode())
        line = await stdout.readline()
        if not line:
            raise RuntimeError(f"{module} failed; run it by hand: echo 1 | python -m {module} {' '.join(arguments)}")
        return Measurement(**json.loads(line))

    try:
        yield run
    finally:
        stdin.close()
        await process.wait()


def _vector_env(kind: str) -> Callable[[str, int], AbstractAsyncContextManager[Run]]:
    return lambda _, sessions: _driver("benchmarks.peers.vector_env", kind, str(sessions))


WAYS = (
    SteppingMethod("in process", "none", open_in_process),
    SteppingMethod("starpod, step_many", "starpod", open_step_many),
    SteppingMethod("starpod, step_many, 2 workers", "starpod_2", open_step_many),
    SteppingMethod("starpod, coroutines", "starpod", open_coroutines),
    *(
        (
            SteppingMethod("starpod load", "starpod_endless", open_load),
            SteppingMethod("starpod load, default policy", "starpod_endless", open_default_load),
        )
        if CHOSEN == "lake"
        else (SteppingMethod("starpod load", "starpod", open_default_load),)
        if TASK.random
        else ()
    ),
    SteppingMethod("starpod, without columns", "starpod", open_stream_calls, most=1024),
    SteppingMethod("starpod, unary", "starpod", open_unary, most=1024),
    SteppingMethod("starpod, unary, blocking", "starpod", open_blocking_unary, most=1),
    SteppingMethod("empty unary call", "starpod", open_empty_calls, most=1024),
    SteppingMethod("OpenEnv", "openenv", _peer("open_openenv"), most=1024),
    SteppingMethod("OpenEnv, tuned", "openenv_tuned", _peer("open_openenv"), most=1024),
    SteppingMethod("dm-env-rpc", "dm_env_rpc", _peer("open_dm_env"), most=1024),
    SteppingMethod("dm-env-rpc, tuned", "dm_env_rpc", _peer("open_dm_env_rpc"), most=1024),
    SteppingMethod(
        "Ray actors", "none", lambda _, sessions: _driver("benchmarks.peers.ray_actors", str(sessions)), most=64
    ),
    SteppingMethod("SyncVectorEnv", "none", _vector_env("SyncVectorEnv")),
    SteppingMethod("AsyncVectorEnv", "none", _vector_env("AsyncVectorEnv"), most=256),
)
