"""Client of an Open Reward Standard server: environments, tools, tasks, and tool calls that are executed once."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal, TypeVar

from pydantic import Base64Bytes, BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

from starpod.env_server.authoring.environment import Busy
from starpod.v1.untrusted import wait_seconds
from starpod.v1.values import MAX_REWARD

T = TypeVar("T")

_SECONDS = 60.0
"""Timeout for each piece of a reply. The server sends a ping every ten seconds while a tool works."""
_STARTING_SECONDS = 120.0
"""Maximum seconds that a session may take to start."""
_CLOSING_SECONDS = 5.0
"""Timeout for ending a session. It is short, because sessions are ended one after another."""
_ATTEMPTS = 5


class ORSError(Exception):
    """The server refused a request, or the connection broke without a reply."""


# --- replies, whose types and ranges are checked ---------------------------------------------------------------------


class TextBlock(BaseModel):
    """Text of a prompt or of a tool's output."""

    type: Literal["text"]
    text: str


class ImageBlock(BaseModel):
    """Image of a prompt or of a tool's output."""

    type: Literal["image"]
    data: Base64Bytes
    mimeType: str  # noqa: N815 - the name in the standard


Block = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolOutput(BaseModel):
    """Output of a tool that was called, with its reward."""

    blocks: list[Block]
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)] | None = None
    finished: bool | None = None
    metadata: dict[str, Any] | None = None


class CallDone(BaseModel):
    """Result of a call that the tool executed."""

    ok: Literal[True]
    output: ToolOutput


class CallFailed(BaseModel):
    """Result of a call that was not executed."""

    ok: Literal[False]
    error: str
    reason: str | None = None


Called = Annotated[CallDone | CallFailed, Field(discriminator="ok")]
_CALLED: TypeAdapter[CallDone | CallFailed] = TypeAdapter(Called)


class Split(BaseModel):
    """A named set of tasks."""

    name: str
    type: str


class TaskCount(BaseModel):
    """Number of tasks of a split."""

    num_tasks: NonNegativeInt


class ListedTool(BaseModel):
    """A tool and the JSON Schema of its arguments."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class TerminalTool(BaseModel):
    """The tool that plain text calls, and its text argument."""

    name: str
    arg: str | None = None


class ToolList(BaseModel):
    """The tools of an environment."""

    tools: list[ListedTool]
    terminal_tool: TerminalTool | None = None


class PackageVersion(BaseModel):
    """Version of the server's package."""

    version: str


@dataclass(frozen=True, slots=True)
class ORSServer:
    """A server at `address`, http://HOST:PORT. Methods raise Busy if no server answers and nothing has changed."""

    address: str

    def ask(self, kind: type[T], path: str, body: Mapping[str, Any] | None = None, session: str = "") -> T:
        """Send a request and return the reply as `kind`. Raises ORSError.

        Args:
            path: path of the URL, with a leading slash.
            body: JSON body of a POST request; None sends a GET request.
            session: id of the session; empty for requests without one.
        """
        with self._open(path, body, session) as reply:
            return self._read(TypeAdapter(kind), path, reply.read())

    def create(self, environment: str, split: str, task: int) -> str:
        """Open a session of the task with this index in a split such as "train", and return its id. Raises ORSError."""
        session = self._answer("/create_session", {}, "")[0]
        if not (session and session.isascii() and session.isprintable()):
            raise ORSError(f"{self.address}/create_session sent {session[:80]!r}, which is no session id")
        body = {"env_name": environment, "split": split, "index": task}
        try:
            self._open("/create", body, session).close()
        except BaseException:
            self.delete(session)
            raise
        return session

    def delete(self, session: str) -> None:
        """End a session if the server can be reached."""
        with contextlib.suppress(Busy, ORSError):
            self._open("/delete", {}, session, _CLOSING_SECONDS, 0.0).close()

    def call(self, environment: str, session: str, tool: str, arguments: Mapping[str, Any]) -> Called:
        """Call a tool exactly once. Raises ORSError.

        If the connection breaks, the reply is requested again by the id that the server gave to the call.
        """
        path, call, reply = f"/{environment}/call", "", ""
        for _ in range(_ATTEMPTS):
            body = {"name": tool, "input": dict(arguments)} | ({"task_id": call} if call else {})
            call, reply = self._answer(path, body, session, call)
            if reply:
                return self._read(_CALLED, path, reply.encode())
        raise ORSError(f"{self.address}{path} broke off {_ATTEMPTS} times")

    def _read(self, kind: TypeAdapter[T], path: str, data: bytes) -> T:
        """Return a JSON reply as `kind`. Raises ORSError if a value is missing, or has another type or range."""
        try:
            return kind.validate_json(data, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in problem["loc"])
            raise ORSError(
                f"{self.address}{path} sent {problem['input']!r:.200}, which cannot be used: {place}{problem['msg']}"
            ) from error

    def _answer(self, path: str, body: Mapping[str, Any], session: str, id_: str = "") -> tuple[str, str]:
        """Send a request and return the id and the text in its events. The text is empty if the connection broke."""
        pieces: list[str] = []
        with self._open(path, body, session) as reply:
            try:
                for event, data in _events(reply):
                    if event == "error":
                        raise ORSError(f"{self.address}{path}: {data}")
                    if event == "task_id":
                        id_ = data
                    else:
                        pieces.append(data)
                    if event == "end":
                        return id_, "".join(pieces)
            except (OSError, http.client.HTTPException) as error:
                if not id_:
                    raise ORSError(f"{self.address}{path} broke off: {error}") from error
        if not id_:
            raise ORSError(f"{self.address}{path} broke off")
        return id_, ""

    def _open(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        session: str,
        seconds: float = _SECONDS,
        starting: float = _STARTING_SECONDS,
    ) -> IO[bytes]:
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        request = urllib.request.Request(
            self.address + path,
            None if body is None else json.dumps(body).encode(),
            {name: value for name, value in headers.items() if value},
        )
        deadline = time.monotonic() + starting
        while True:
            try:
                reply: IO[bytes] = urllib.request.urlopen(request, timeout=seconds)
                return reply
            except urllib.error.HTTPError as error:
                with error:
                    error_text = error.read().decode(errors="replace")
                if error.code != 503 or time.monotonic() > deadline:
                    raise ORSError(f"{self.address}{path}: {error.code} {_detail(error_text)}") from error
                seconds_to_wait = wait_seconds(error.headers.get("Retry-After", ""))
                time.sleep(min(seconds_to_wait, max(0.0, deadline - time.monotonic())))
            except urllib.error.URLError as error:  # no connection, so nothing was sent
                raise Busy(f"no ORS server answers at {self.address}: {error.reason}") from error
            except (OSError, http.client.HTTPException) as error:
                raise ORSError(f"{self.address}{path}: {error}") from error


def _events(reply: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield name and data of a reply's server-sent events."""
    event, data = "message", list[str]()
    for raw_line in reply:
        line = raw_line.decode(errors="replace").rstrip("\r\n")
        name, _, value = line.partition(":")
        if not line:
            if data:
                yield event, "\n".join(data)
            event, data = "message", []
        elif name == "event":
            event = value.removeprefix(" ")
        elif name == "data":
            data.append(value.removeprefix(" "))


def _detail(text: str) -> str:
    """Return FastAPI's description of an error in one line."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return str(json.loads(text)["detail"])
    return text[:200]
