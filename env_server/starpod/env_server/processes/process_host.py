"""Class `process`: an episode in a separate process, so that a crash, leak or hang costs only one session.

Parent and child exchange frames over a socket pair. They do not use pickle, because the child may have been
compromised. Before the episode starts, the child gives up the rights listed in sandbox.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from multiprocessing.context import ForkServerProcess
from typing import Any, ClassVar, TypeVar

from google.protobuf.message import DecodeError

from starpod.env_server.authoring.environment import Busy, Environment, Limits, OptionsError, Unavailable
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import EnvironmentRaised
from starpod.env_server.episodes.live_episode import EpisodeEnded, LiveEpisode, Pictures, Want
from starpod.env_server.episodes.state import StateError, decode, encode
from starpod.env_server.episodes.timing import environment_works
from starpod.env_server.processes.forking import fork_context, leave_fork_server
from starpod.env_server.processes.hosts import (
    HostDied,
    ResetPlan,
    Started,
    StateTooLarge,
    instructions_of,
    start_episode,
)
from starpod.env_server.processes.wire import (
    LENGTH,
    BadProcessReply,
    ResultTooLarge,
    frame,
    pack_error,
    pack_result,
    read_frame,
    unpack,
)
from starpod.env_server.registry import Reference, load_class, reference_to
from starpod.env_server.sandbox.sandbox import Sandbox, SandboxReport, close_inherited, confine, end_with_parent
from starpod.serving.user_code import end_forked_copy
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import MAX_REWARD, Action

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_BUFFER_BYTES = 2**20
"""Limit of the buffer for a child's replies, in bytes. If a child sends more than was requested, the rest stays in the
socket."""

_LONGEST_WAIT = 86_400.0
_LATE = 0.1
"""A timer that fires more than this many seconds late shows that this process was stalled."""
M = TypeVar("M", pb.ResetResponse, pb.Observation, pb.Transition)


class ProcessHost:
    """Host that runs one episode in a child process.

    `alive` is the number of hosts that are not closed. A host counts from its creation, before its process starts, so
    that concurrent opens cannot exceed the limit on processes.
    """

    episode: LiveEpisode | None = None
    alive = 0
    confinements: ClassVar[dict[type[Environment], SandboxReport]] = {}
    """Report on the confinement of each environment's latest process."""

    def __init__(self, environment: type[Environment], sandbox: Sandbox) -> None:
        self._environment = environment
        self._sandbox = sandbox
        self._timeout = environment.spec.step_timeout
        self._process: ForkServerProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False
        ProcessHost.alive += 1

    async def reset(self, plan: ResetPlan) -> Started:
        limits = plan.limits
        # only options that were given, as in a snapshot
        options = plan.options.model_dump(mode="json", exclude_unset=True)
        arguments = [options, [limits.max_turns, limits.max_actions_per_turn, limits.max_actions]]
        data = await self._call("reset", *arguments, plan.seed, plan.dynamics_seed, _want_flags(plan.want))
        response = self._message(pb.ResetResponse, data)
        return Started(response.session.observation, response.instructions)

    async def turn(self, actions: list[Action], want: Want) -> pb.Transition:
        request = pb.StepRequest(actions=[convert.action_to(action) for action in actions])
        data = await self._call("turn", request.SerializeToString(), _want_flags(want))
        transition = self._message(pb.Transition, data)
        rewards = [transition.reward, *transition.reward_parts.values()]
        self._expect_numbers("reward", *rewards, *(outcome.reward for outcome in transition.outcomes))
        self._expect_numbers("score", transition.observation.score)
        return transition

    async def observe(self, want: Want, pictures: Pictures | None = None) -> pb.Observation:
        return self._message(pb.Observation, await self._call("observe", _want_flags(want)))

    async def render(self, mode: str) -> str | bytes:
        picture = await self._call("render", mode)
        if not isinstance(picture, bytes if mode == "png" else str):
            raise self._distrust(f"no {mode} for a picture")
        return picture

    async def instructions(self) -> str:
        return str(await self._call("instructions"))

    async def save(self) -> bytes:
        """Return the whole episode as bytes. Raises StateTooLarge."""
        data = await self._call("save")
        if not isinstance(data, bytes):
            raise self._distrust("no bytes for a state")
        return data

    async def load(self, data: bytes, *, rehearse: bool = False) -> None:
        """Load a saved episode. Raises StateError for other data. A forged state can only break its own process."""
        await self._call("load", data)

    async def fork(self, dynamics_seed: int | None) -> ProcessHost:
        copy = ProcessHost(self._environment, self._sandbox)
        try:
            state = await self.save()
            try:
                await copy.load(state)
                if dynamics_seed is not None:
                    await copy._call("reseed", dynamics_seed)
            except HostDied as death:
                raise EnvironmentRaised.of_copy(death) from death
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        ProcessHost.alive -= 1
        if self._writer is not None:
            self._writer.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            threading.Thread(target=_reap, args=(process,), daemon=True).start()

    async def try_out(self) -> None:
        """Start a process and end it. Raises HostDied if it does not start."""
        try:
            await self._start()
        finally:
            self.close()

    def _message(self, kind: type[M], data: Any) -> M:
        try:
            return kind.FromString(data)
        except (DecodeError, TypeError) as error:
            raise self._distrust(f"no {kind.__name__}") from error

    def _expect_numbers(self, what: str, *values: float) -> None:
        if bad_values := [value for value in values if not abs(value) <= MAX_REWARD]:
            raise self._distrust(f"a {what} of {bad_values[0]}")

    def _distrust(self, reply: str) -> HostDied:
        """Kill the process and return HostDied, because it sent a reply that no environment sends."""
        self.close()
        return HostDied(f"sent {reply}, so it was killed")

    async def _call(self, verb: str, *arguments: Any) -> Any:
        if self._process is None:
            await self._start()
        # A separate task, because the caller's coroutine may have been started outside of any task.
        exchange = asyncio.create_task(self._exchange(frame(encode([verb, *arguments]))))
        is_late = True
        with environment_works():
            while is_late and not exchange.done():
                deadline = time.monotonic() + self._timeout
                await asyncio.wait({exchange}, timeout=self._timeout)
                # If this process was stalled, its child may have been, too, and gets the full time again.
                is_late = time.monotonic() - deadline > _LATE
        if not exchange.done():
            exchange.cancel()
            self.close()
            raise HostDied(f"hung: no answer to {verb} within {self._timeout:g} s, so it was killed")
        try:
            kind, value, detail = unpack(exchange.result())
        except BadProcessReply as error:
            raise self._distrust(f"a bad reply: {error}") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise HostDied(await self._exit_reason()) from error
        match kind:
            case "ok":
                return value
            case "over":
                raise EpisodeEnded
            case "state":
                raise StateError(value)
            case "options":
                raise OptionsError(value)
            case "busy" if isinstance(detail, int | float) and 0 <= detail < _LONGEST_WAIT:
                raise Busy(value, float(detail))
            case "unavailable":
                raise Unavailable(value)
            case "large" if verb == "save":
                raise StateTooLarge(value)
            case "bug" | "large":
                raise EnvironmentRaised(str(detail), value, intact=verb != "turn")
        raise self._distrust("an unknown kind of reply")

    async def _start(self) -> None:
        parent_socket, child_socket = socket.socketpair()
        try:
            process = fork_context().Process(
                target=_child_main, args=(child_socket, reference_to(self._environment), self._sandbox), daemon=True
            )
            await asyncio.to_thread(process.start)
        finally:
            child_socket.close()
        self._process = process
        self._reader, self._writer = await asyncio.open_connection(sock=parent_socket, limit=_BUFFER_BYTES)
        greeting = asyncio.create_task(read_frame(self._reader))
        done, _ = await asyncio.wait({greeting}, timeout=_START_SECONDS)
        if not done or greeting.exception():
            greeting.cancel()
            raise HostDied(f"did not start: {await self._exit_reason()}")
        kind, text, _ = unpack(greeting.result())
        if kind == "refused":
            self.close()
            raise HostDied(f"cannot be confined as --sandbox require asks: {text}")
        if kind == "confined":
            self._note(SandboxReport(**json.loads(text)))

    def _note(self, report: SandboxReport) -> None:
        """Store the confinement of an environment's processes, and log it if it changed."""
        if self.confinements.get(self._environment) != report:
            self.confinements[self._environment] = report
            level = logging.WARNING if report.missing else logging.INFO
            logger.log(level, "sandbox of %s: %s", self._environment.spec.id, report)

    async def _exchange(self, request: bytes) -> bytes:
        assert self._writer is not None
        assert self._reader is not None
        self._writer.write(request)
        await self._writer.drain()
        return await read_frame(self._reader)

    async def _exit_reason(self) -> str:
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


def _reap(process: ForkServerProcess) -> None:
    process.join(10)


def _want_flags(want: Want) -> list[bool]:
    return [want.valid_actions, want.state_key, want.expert_action, want.score, want.image]


# --- the child ---------------------------------------------------------------------------------------------------


def _child_main(connection: socket.socket, reference: Reference, sandbox: Sandbox) -> None:
    """Serve one episode until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sandbox.mode == "off":
        os.dup2(2, 1)  # standard output belongs to the server
    if sys.platform == "linux":
        leave_fork_server()  # a child that hangs in native code cannot notice that the server is gone
    end_with_parent()
    if sandbox.mode != "off":
        close_inherited(connection.fileno())
    stream = connection.makefile("rwb")
    environment = load_class(reference)
    environment.prepare()
    _send(stream, _confine(sandbox, environment))
    episode: LiveEpisode | None = None
    while header := stream.read(LENGTH.size):
        verb, *arguments = decode(stream.read(LENGTH.unpack(header)[0]))
        process_id = os.getpid()
        try:
            episode, result = _answer(environment, episode, verb, arguments)
            reply = pack_result(result)
        except EpisodeEnded:
            reply = pack_error("over", "")
        except StateError as error:
            reply = pack_error("state", str(error))
        except OptionsError as error:
            reply = pack_error("options", str(error))
        except Busy as busy:
            reply = pack_error("busy", busy.message, busy.retry_after)
        except Unavailable as missing:
            reply = pack_error("unavailable", str(missing))
        except ResultTooLarge as error:
            reply = pack_error("large", str(error), type(error).__name__)
        except BaseException as error:
            bug = EnvironmentRaised.from_exception(environment, error, intact=False)
            reply = pack_error("bug", bug.message, bug.exception)
        finally:
            end_forked_copy(process_id, environment.spec.id)
        _send(stream, reply)
    # Skip all clean-up, because the environment may be in any state.
    os._exit(0)


def _confine(sandbox: Sandbox, environment: type[Environment]) -> bytes:
    """Give up all rights that can be given up, and return the greeting for the parent process."""
    if sandbox.mode == "off":
        return pack_result("off")
    module_file = getattr(sys.modules[environment.__module__], "__file__", None)
    report = confine(sandbox, module_file)
    if sandbox.mode == "require" and report.missing_measures:
        return pack_error("refused", ", ".join(report.missing_measures))
    return pack_error("confined", json.dumps(asdict(report)))


def _send(stream: Any, reply: bytes) -> None:
    stream.write(frame(reply))
    stream.flush()


def _answer(
    environment: type[Environment], episode: LiveEpisode | None, verb: str, arguments: list[Any]
) -> tuple[LiveEpisode | None, Any]:
    """Execute a call, and return the episode after it and its result."""
    match verb, arguments:
        case "reset", [options, limits, seed, dynamics_seed, want]:
            wanted = Want(*want)
            plan = ResetPlan(environment.Options.model_validate(options), Limits(*limits), seed, dynamics_seed, wanted)
            new_episode, started = start_episode(environment, plan)
            response = pb.ResetResponse(instructions=started.instructions)
            convert.copy_observation(response.session.observation, started.observation)
            return new_episode, response.SerializeToString()
        case "load", [data]:
            return LiveEpisode.load(environment, data), None
    assert episode is not None
    match verb, arguments:
        case "turn", [request, want]:
            actions = convert.actions_from(pb.StepRequest.FromString(request).actions)
            turn = episode.undoable_turn if environment.spec.slow_render else episode.turn
            return episode, convert.transition_to(turn(actions, Want(*want))).SerializeToString()
        case "observe", [want]:
            return episode, convert.observation_to(episode.observe(Want(*want))).SerializeToString()
        case "render", [mode]:
            return episode, episode.render(mode)
        case "instructions", []:
            return episode, instructions_of(episode)
        case "save", []:
            return episode, episode.save()
        case "reseed", [dynamics_seed]:
            return episode.fork(dynamics_seed), None
    raise ValueError(f"unknown verb {verb}")
