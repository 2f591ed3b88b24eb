"""Class `process`: an episode in a process of its own, so that a crash, a leak or a hang costs one session alone.

Parent and child exchange frames over a socket pair: four bytes of length, then a state-encoded list. Never pickle:
the parent must be able to trust what it decodes, whatever the child has become.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from starpod.env_server import convert
from starpod.env_server.environment import Action, Busy, Environment, Limits, OptionsError
from starpod.env_server.episode import Episode, EpisodeOver, Want
from starpod.env_server.hosts import EnvironmentBug, HostDied, ResetPlan, start_episode
from starpod.env_server.registry import Reference, load_class, reference_to
from starpod.env_server.state import StateError, decode, encode
from starpod.env_server.timing import environment_works
from starpod.v1 import environment_pb2 as pb

_LENGTH = struct.Struct("<I")
_START_SECONDS = 60.0

preloaded = ["starpod.env_server.process_host"]
"""Modules that the fork server imports, until its first child."""


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The fork server imports once what every child needs, so that a child starts in milliseconds.
    context.set_forkserver_preload(preloaded)
    return context


class ProcessHost:
    """Runs one episode in a child process. `alive` counts the children of this process."""

    episode: Episode | None = None
    alive = 0

    def __init__(self, environment: type[Environment]) -> None:
        self._environment = environment
        self._timeout = environment.spec.step_timeout
        self._process: ForkServerProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def reset(self, plan: ResetPlan) -> pb.Observation:
        limits = plan.limits
        options = plan.options.model_dump(mode="json")
        arguments = [options, [limits.max_turns, limits.max_actions_per_turn, limits.max_actions]]
        data = await self._call("reset", *arguments, plan.seed, plan.dynamics_seed, _want_flags(plan.want))
        return pb.Observation.FromString(data)

    async def turn(self, actions: list[Action], want: Want) -> pb.Transition:
        request = pb.StepRequest(actions=[convert.action_to(action) for action in actions])
        return pb.Transition.FromString(await self._call("turn", request.SerializeToString(), _want_flags(want)))

    async def observe(self, want: Want) -> pb.Observation:
        return pb.Observation.FromString(await self._call("observe", _want_flags(want)))

    async def render(self, mode: str) -> str | bytes:
        picture = await self._call("render", mode)
        assert isinstance(picture, str | bytes)
        return picture

    async def instructions(self) -> str:
        return str(await self._call("instructions"))

    async def save(self) -> bytes:
        data = await self._call("save")
        assert isinstance(data, bytes)
        return data

    async def load(self, data: bytes) -> None:
        """Takes over a saved episode. Raises StateError if it is not one."""
        await self._call("load", data)

    async def fork(self, dynamics_seed: int | None) -> ProcessHost:
        copy = ProcessHost(self._environment)
        try:
            await copy._call("load", await self.save())
            if dynamics_seed is not None:
                await copy._call("reseed", dynamics_seed)
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        process, self._process = self._process, None
        if process is not None:
            ProcessHost.alive -= 1
            process.kill()
            threading.Thread(target=_bury, args=(process,), daemon=True).start()

    async def _call(self, verb: str, *arguments: Any) -> Any:
        if self._process is None:
            await self._start()
        # A task of its own under `wait`: the caller's coroutine may have been begun outside of any task.
        exchange = asyncio.create_task(self._exchange(encode([verb, *arguments])))
        with environment_works():
            done, _ = await asyncio.wait({exchange}, timeout=self._timeout)
        if not done:
            exchange.cancel()
            self.close()
            raise HostDied(f"hung: no answer to {verb} within {self._timeout:g} s, so it was killed")
        try:
            kind, *reply = decode(exchange.result())
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise HostDied(await self._autopsy()) from error
        match kind:
            case "ok":
                return reply[0]
            case "over":
                raise EpisodeOver
            case "state":
                raise StateError(reply[0])
            case "options":
                raise OptionsError(reply[0])
            case "busy":
                raise Busy(reply[0], reply[1])
        raise EnvironmentBug(reply[0], reply[1], intact=bool(reply[2]))

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = _context().Process(
                target=_child_main, args=(theirs, reference_to(self._environment)), daemon=True
            )
            await asyncio.to_thread(process.start)
        finally:
            theirs.close()
        self._process = process
        ProcessHost.alive += 1
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**30)
        greeting = asyncio.create_task(self._receive())
        done, _ = await asyncio.wait({greeting}, timeout=_START_SECONDS)
        if not done or greeting.exception():
            greeting.cancel()
            raise HostDied(f"did not start: {await self._autopsy()}")

    async def _exchange(self, frame: bytes) -> bytes:
        assert self._writer is not None
        self._writer.write(_LENGTH.pack(len(frame)) + frame)
        await self._writer.drain()
        return await self._receive()

    async def _receive(self) -> bytes:
        assert self._reader is not None
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return await self._reader.readexactly(length)

    async def _autopsy(self) -> str:
        process = self._process
        if process is None:
            return "was closed"
        for _ in range(500):
            if process.exitcode is not None:
                break
            await asyncio.sleep(0.01)
        code = process.exitcode
        self.close()
        if code is None:
            return "stopped answering and was killed"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"


def _bury(process: ForkServerProcess) -> None:
    process.join(10)


def _want_flags(want: Want) -> list[bool]:
    return [want.valid_actions, want.state_key, want.expert_action, want.score, want.image]


# --- the child ---------------------------------------------------------------------------------------------------


def _child_main(connection: socket.socket, reference: Reference) -> None:
    """Serves one episode until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output belongs to the server
    if sys.platform == "linux":
        # A child that hangs in native code cannot notice that the server is gone: the kernel tells it, once the fork
        # server ends. That one ends with the server, unless we keep the pipe open by which it watches the server.
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    stream = connection.makefile("rwb")
    environment = load_class(reference)
    environment.prepare()
    episode: Episode | None = None
    _send(stream, ["ok", None])
    while header := stream.read(_LENGTH.size):
        verb, *arguments = decode(stream.read(_LENGTH.unpack(header)[0]))
        try:
            episode, result = _answer(environment, episode, verb, arguments)
            reply = ["ok", result]
        except EpisodeOver:
            reply = ["over"]
        except StateError as error:
            reply = ["state", str(error)]
        except OptionsError as error:
            reply = ["options", str(error)]
        except Busy as busy:
            reply = ["busy", busy.message, busy.retry_after]
        except Exception as error:
            reply = ["bug", type(error).__name__, str(error), verb != "turn"]
        _send(stream, reply)
    # No clean-up of whatever the environment has become: the process ends here.
    os._exit(0)


def _send(stream: Any, reply: list[Any]) -> None:
    frame = encode(reply)
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def _answer(
    environment: type[Environment], episode: Episode | None, verb: str, arguments: list[Any]
) -> tuple[Episode | None, Any]:
    """The episode after the call, and the call's result."""
    match verb, arguments:
        case "reset", [options, limits, seed, dynamics_seed, want]:
            wanted = Want(*want)
            plan = ResetPlan(environment.Options.model_validate(options), Limits(*limits), seed, dynamics_seed, wanted)
            episode = start_episode(environment, plan)
            return episode, convert.observation_to(episode.observe(wanted)).SerializeToString()
        case "load", [data]:
            return Episode.load(environment, data), None
    assert episode is not None
    match verb, arguments:
        case "turn", [request, want]:
            actions = convert.actions_from(pb.StepRequest.FromString(request).actions)
            turn = episode.undoable_turn if environment.spec.slow_render else episode.turn
            return episode, convert.transition_to(turn(actions, Want(*want))).SerializeToString()
        case "observe", [want]:
            return episode, convert.observation_to(episode.observe(Want(*want))).SerializeToString()
        case "render", [mode]:
            return episode, episode.environment.render(mode)
        case "instructions", []:
            return episode, episode.environment.instructions()
        case "save", []:
            return episode, episode.save()
        case "reseed", [dynamics_seed]:
            return episode.fork(dynamics_seed), None
    raise ValueError(f"unknown verb {verb}")
