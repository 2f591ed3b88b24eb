"""The parent's side of a process of class `process`: start, calls, time-outs and end.

Parent and child exchange frames over a socket pair. They do not use pickle, because the child may have been
compromised.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from multiprocessing.context import ForkServerProcess
from typing import Any, ClassVar

from starpod.env_server.authoring.environment import Busy, Environment, OptionsError, Unavailable
from starpod.env_server.episodes.errors import EnvironmentRaised
from starpod.env_server.episodes.live_episode import EpisodeEnded
from starpod.env_server.episodes.state import StateError, encode
from starpod.env_server.episodes.timing import environment_works
from starpod.env_server.processes.child import serve_episode
from starpod.env_server.processes.forking import fork_context
from starpod.env_server.processes.hosts import HostDied, StateTooLarge
from starpod.env_server.processes.wire import BadProcessReply, frame, read_frame, unpack
from starpod.env_server.registry import reference_to
from starpod.env_server.sandbox.sandbox import Sandbox, SandboxReport

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_BUFFER_BYTES = 2**20
"""Limit of the buffer for a child's replies, in bytes. If a child sends more than was requested, the rest stays in the
socket."""

_LONGEST_WAIT = 86_400.0
_LATE = 0.1
"""A timer that fires more than this many seconds late shows that this process was stalled."""


class ChildProcess:
    """A process for one episode. It counts as alive from its creation, so that concurrent opens cannot exceed a limit.

    `alive` is the number of child processes that are not closed. Some of them may not have started.
    """

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
        ChildProcess.alive += 1

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Return the result of a call, and start the process for the first one.

        Raises:
            HostDied: the process does not start, ended, hung or sent what no environment sends, or a machine is gone.
            EnvironmentRaised: the environment raised, or a result is too large.
            Exception: what the environment may raise: Busy, EpisodeEnded, OptionsError, StateError, StateTooLarge and
                Unavailable.
        """
        if self._process is None:
            await self.start()
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
            raise self.distrust(f"a bad reply: {error}") from error
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
            case "lost":
                self.close()
                raise HostDied(value)
            case "large" if verb == "save":
                raise StateTooLarge(value)
            case "bug" | "large":
                raise EnvironmentRaised(str(detail), value, intact=verb != "turn")
        raise self.distrust("an unknown kind of reply")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        ChildProcess.alive -= 1
        if self._writer is not None:
            self._writer.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            threading.Thread(target=_reap, args=(process,), daemon=True).start()

    async def try_out(self) -> None:
        """Start a process and end it. Raises HostDied if it does not start."""
        try:
            await self.start()
        finally:
            self.close()

    def distrust(self, reply: str) -> HostDied:
        """Kill the process and return HostDied, because it sent a reply that no environment sends."""
        self.close()
        return HostDied(f"sent {reply}, so it was killed")

    async def start(self) -> None:
        """Start the process. Raises HostDied."""
        parent_socket, child_socket = socket.socketpair()
        try:
            process = fork_context().Process(
                target=serve_episode, args=(child_socket, reference_to(self._environment), self._sandbox), daemon=True
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
