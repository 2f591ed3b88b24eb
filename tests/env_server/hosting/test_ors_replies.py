"""Replies of an Open Reward Standard server that lies: each is an error with the address, before it is played."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from starpod.env_server.hosting.ors import ORSGame, host
from starpod.env_server.hosting.ors_server import ORSError
from starpod.env_server.hosting.request import HostingError

BLOCK = {"type": "text", "text": "1 + 1 = ?"}
OUTPUT = {"blocks": [BLOCK], "reward": 0.5, "finished": True, "metadata": {"right": True}}
PATHS: dict[str, Any] = {
    "/list_environments": ["sums"],
    "/sums/splits": [{"name": "train", "type": "train"}],
    "/sums/num_tasks": {"num_tasks": 3},
    "/sums/tools": {"tools": [{"name": "answer", "description": "Answer.", "input_schema": None}]},
    "/version": {"version": "1.2.3"},
    "/create_session": "one",
    "/create": {},
    "/delete": {},
    "/sums/prompt": [BLOCK],
    "/sums/call": {"ok": True, "output": OUTPUT},
}


@contextlib.contextmanager
def ors(lies: dict[str, Any], requests: list[str] | None = None) -> Iterator[str]:
    """A server that gives the address of a reply's value, bytes as they are, or a status.

    Paths of its requests are appended to `requests`.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if requests is not None:
                requests.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            value = {**PATHS, **lies}[self.path]
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            if self.path == "/create_session":
                body = b"event: task_id\ndata: " + value.encode() + b"\n\nevent: end\ndata: {}\n\n"
            elif self.path.endswith("/call"):
                body = b"event: task_id\ndata: 7\n\nevent: end\ndata: " + body + b"\n\n"
            self.send_response(value if isinstance(value, int) else 200)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the name that http.server calls

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def play(address: str) -> Any:
    """The first call's outcome, and what is seen then."""
    factory = host(f"{address}/sums").factory  # type: ignore[attr-defined]
    game = ORSGame(factory, seed=1)
    assert game.observe() == ["1 + 1 = ?"]
    return game.play('{"tool_name": "answer", "arguments": {}}')


def with_output(**fields: Any) -> dict[str, Any]:
    return {"/sums/call": {"ok": True, "output": {**OUTPUT, **fields}}}


def test_a_true_server_is_played() -> None:
    with ors({}) as address:
        outcome = play(address)
    assert (outcome.reward, outcome.terminated, outcome.info) == (0.5, True, {"metadata": {"right": True}})


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        (with_output(reward=float("nan")), "reward: .*finite number"),
        (with_output(reward=1e308), "reward: .*less than or equal to"),
        (with_output(reward="1"), "sent '1', .*reward: .*valid number"),
        (with_output(reward=True), "sent True, .*reward: .*valid number"),
        (with_output(finished="no"), "finished: .*boolean"),
        (with_output(blocks=None), "blocks: .*array"),
        (with_output(blocks=[{"type": "image", "mimeType": "image/png"}]), "data: Field required"),
        (with_output(blocks=[{"type": "text", "text": 5}]), "text: .*string"),
        ({"/sums/call": {"ok": True}}, "output: Field required"),
        ({"/sums/call": {"ok": 2}}, "ok.*expected tags"),
        ({"/sums/call": None}, "sent None"),
        ({"/sums/call": b"<html>"}, "Invalid JSON"),
        ({"/sums/prompt": {}}, "/sums/prompt sent .*array"),
        ({"/create_session": "a\x7fb"}, "no session id"),
        ({"/sums/num_tasks": {"num_tasks": "3"}}, "num_tasks: .*integer"),
        ({"/sums/num_tasks": {"num_tasks": True}}, "num_tasks: .*integer"),
        ({"/sums/num_tasks": {"num_tasks": -1}}, "num_tasks: .*greater"),
        ({"/sums/tools": {"tools": [{"name": 5}]}}, "name: .*string"),
        ({"/sums/splits": [["train", "train"]]}, "/sums/splits sent"),
        ({"/list_environments": b"\xff"}, "/list_environments sent"),
    ],
)
def test_a_reply_that_cannot_be_used_is_an_error_with_the_address(lies: dict[str, Any], said: str) -> None:
    with ors(lies) as address, pytest.raises((ORSError, HostingError), match=rf"(?=.*{address}/).*{said}"):
        play(address)


def test_a_session_whose_task_is_refused_is_ended() -> None:
    requests: list[str] = []
    with ors({"/create": 400}, requests) as address, pytest.raises(ORSError, match="/create: 400"):
        play(address)
    assert requests[-3:] == ["/create_session", "/create", "/delete"]
