"""Hostile callers of the Open Reward Standard and of MCP: wrong values everywhere, bodies, headers, and hang-ups."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.hostile.conftest import CODES, MEBIBYTE, VILLAIN, WITNESS, Target
from tests.hostile.test_http import JSON, address_of, answer, request, sized

WALK = "walk-v1"
MCP = f"/mcp/{WALK}/mine"
MODERN, HANDSHAKE = "2026-07-28", "2025-06-18"
CLIENT = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": {"name": "hostile", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
"""Keys of `_meta` that the modern protocol requires in each request."""
SURROGATE = '"\\ud800"'
VALUES = {
    "null": "null",
    "true": "true",
    "minus one": "-1",
    "a fraction": "1.5",
    "zero": "0",
    "20 digits": "9" * 20,
    "400 digits": "9" * 400,
    "5,000 digits": "9" * 5_000,
    "a text of 20 digits": f'"{"9" * 20}"',
    "a text of 5,000 digits": f'"{"9" * 5_000}"',
    "beyond a double": "1e999",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "no text": '""',
    "a long text": f'"{"x" * 5_000}"',
    "half of a pair": SURROGATE,
    "half of a pair as a name": f"{{{SURROGATE}:1}}",
    "half of a pair in a list": f"[{SURROGATE}]",
    "NUL": '"\\u0000"',
    "a list": "[]",
    "a list of numbers": "[1]",
    "a list of texts": '["a"]',
    "an object": "{}",
    "an object of objects": '{"a":[{}]}',
    "90 lists": "[" * 90 + "]" * 90,
    "150 lists": "[" * 150 + "]" * 150,
    "150 objects": '{"a":' * 150 + "1" + "}" * 150,
    "900 lists": "[" * 900 + "]" * 900,
    "50,000 lists": "[" * 50_000 + "]" * 50_000,
    "no value": "",
}
ORS = (
    *((f"/{path}", "%s") for path in ("create_session", "create", f"{WALK}/call", f"{WALK}/tasks", "ping")),
    ("/create", '{"env_name":%s,"task_spec":{"seed":1}}'),
    ("/create", f'{{"env_name":"{WALK}","task_spec":%s}}'),
    ("/create", f'{{"env_name":"{WALK}","task_spec":{{"seed":%s}}}}'),
    ("/create", f'{{"env_name":"{WALK}","task_spec":{{"seed":1,"options":%s}}}}'),
    ("/create", '{"env_name":"frozen_lake-v1","task_spec":{"seed":1,"options":{"size":%s}}}'),
    ("/create", f'{{"env_name":"{WALK}","split":%s,"index":1}}'),
    ("/create", f'{{"env_name":"{WALK}","split":"train","index":%s}}'),
    ("/create", f'{{"env_name":"{WALK}","task_spec":{{"seed":1}},"toolset_name":%s}}'),
    (f"/{WALK}/tasks", '{"split":%s}'),
    (f"/{WALK}/num_tasks", '{"split":%s}'),
    (f"/{WALK}/task", '{"split":"train","index":%s}'),
    (f"/{WALK}/task_range", '{"split":"test","start":%s}'),
    (f"/{WALK}/task_range", '{"split":"test","stop":%s}'),
    (f"/{WALK}/call", '{"name":%s,"input":{"actions":["Left"]}}'),
    (f"/{WALK}/call", '{"name":"step","input":%s}'),
    (f"/{WALK}/call", '{"name":"step","input":{"actions":%s}}'),
    (f"/{WALK}/call", '{"name":"step","input":{"actions":[%s]}}'),
    (f"/{WALK}/call", '{"name":"step","input":{"actions":["Left"]},"task_id":%s}'),
)
TOOL = '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"%s","arguments":%s%s}}'
MESSAGES = (
    "%s",
    '{"jsonrpc":%s,"id":1,"method":"tools/list"}',
    '{"jsonrpc":"2.0","id":%s,"method":"tools/list"}',
    '{"jsonrpc":"2.0","id":1,"method":%s}',
    '{"jsonrpc":"2.0","id":1,"method":"initialize","params":%s}',
    '{"jsonrpc":"2.0","method":"notifications/cancelled","params":%s}',
    '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":%s}',
    '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%s}}',
    TOOL.replace('"arguments":%s%s', '"arguments":{},"_meta":%%s') % "reset",
    *(
        TOOL % (tool, arguments, "")
        for tool, arguments in (
            ("step", "%s"),
            ("step", '{"actions":%s}'),
            ("step", '{"actions":[%s]}'),
            ("step", '{"actions":["Left"],"step_index":%s}'),
            ("reset", '{"seed":%s}'),
            ("reset", '{"options":%s}'),
            ("reset", '{"image":%s}'),
            ("observe", '{"image":%s}'),
            ("fork", '{"name":%s}'),
        )
    ),
    *(
        TOOL % (tool, "{}", f',"_meta":{{"starpod.v1/request":{fields}}}')
        for tool, fields in (
            ("reset", "%s"),
            ("reset", '{"want":%s}'),
            ("reset", '{"limits":{"max_turns":%s}}'),
            ("reset", '{"lease_seconds":%s}'),
            ("step", '{"actions":%s}'),
            ("step", '{"epoch":%s}'),
            ("fork", '{"count":%s}'),
            ("fork", '{"randomness":%s}'),
        )
    ),
)


class Player:
    """Another tenant's sessions over both protocols."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {WITNESS}", "x-session-id": "witness", "accept": "application/json"}
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60)
        self._turn = 0
        created = self._http.post("/create", json={"env_name": WALK, "task_spec": {"seed": 11}})
        assert created.status_code == 200, created.text
        self._tool("reset", seed=11)

    def look(self) -> None:
        """Plays a turn of each: the same turn, of the same episode."""
        call = {"name": "step", "input": {"actions": ["Left"]}}
        events = self._http.post(f"/{WALK}/call", json=call).text
        assert f"event: task_id\ndata: {self._turn}\n" in events
        result = json.loads(events.rpartition("event: end\ndata: ")[2])
        played = self._tool("step", actions=["Left"])
        self._turn += 1
        assert played["structuredContent"]["next_step_index"] == self._turn
        assert played["content"][0]["text"] == result["output"]["blocks"][0]["text"]

    def _tool(self, name: str, **arguments: Any) -> Any:
        params = {"name": name, "arguments": arguments, "_meta": CLIENT}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        headers = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": name}
        return self._http.post(f"/mcp/{WALK}/witness", json=body, headers=headers).json()["result"]


@pytest.fixture(scope="module")
def player(target: Target) -> Player:
    return Player(target.url)


@contextlib.contextmanager
def unharmed(target: Target, player: Player) -> Iterator[httpx.Client]:
    """Yields the villain's client. Then checks the server (Target.unharmed), and that the player's sessions go on."""
    said = len(target.server.log)
    headers = {"authorization": f"Bearer {VILLAIN}", "content-type": "application/json", "accept": "application/json"}
    with target.unharmed(), httpx.Client(base_url=target.url, headers=headers, trust_env=False, timeout=60) as villain:
        yield villain
        assert villain.get("/v1/health").json() == {"status": "SERVING"}
        player.look()
    assert "Traceback" not in target.server.log[said:], target.server.log[said:][-4000:]


def check(response: httpx.Response, what: object) -> None:
    """Check that no bug is reported, by the status, as an event, or as the result of a tool."""
    told = (what, response.status_code, response.text[:1000])
    assert response.status_code < 500, told
    assert "SERVER_BUG" not in response.text and "ENVIRONMENT_BUG" not in response.text, told
    if "text/event-stream" in response.headers.get("content-type", ""):
        last = response.text.removesuffix("\n\n").rpartition("\n\n")[2]
        name, _, data = last.partition("\n")
        assert name == "event: end" or data.removeprefix("data: ").partition(":")[0] in CODES, told


@pytest.mark.parametrize(("path", "template"), ORS, ids=[f"{path} {template}" for path, template in ORS])
def test_values_of_the_standard(target: Target, player: Player, path: str, template: str) -> None:
    with unharmed(target, player) as villain:
        session = {"x-session-id": f"{path} {template}"[:128]}
        villain.post("/create", json={"env_name": WALK, "task_spec": {"seed": 1}}, headers=session)
        for name, value in VALUES.items():
            own = {"x-session-id": f"{name} {template}"[:128]} if path == "/create" else session
            check(villain.post(path, content=template.replace("%s", value), headers=own), name)
        turn = {"name": "step", "input": {"actions": ["Left"]}}
        assert '"ok": true' in villain.post(f"/{WALK}/call", json=turn, headers=session).text


@pytest.mark.parametrize("template", MESSAGES)
@pytest.mark.parametrize("version", [MODERN, HANDSHAKE])
def test_values_of_mcp(target: Target, player: Player, version: str, template: str) -> None:
    tool = next((name for name in ("step", "reset", "observe", "fork") if f'"name":"{name}"' in template), "")
    method = next((name for name in ("tools/call", "initialize") if name in template), "tools/list")
    headers = {"mcp-protocol-version": version, "mcp-method": method, **({"mcp-name": tool} if tool else {})}
    if version == MODERN:
        meta = f'"_meta":{{{json.dumps(CLIENT)[1:-1]}'
        template = template.replace('"_meta":{', f"{meta},").replace('"params":{"name"', f'"params":{{{meta}}},"name"')
    with unharmed(target, player) as villain:
        for place, (name, value) in enumerate(VALUES.items()):
            path = MCP if place % 2 else f"/mcp/{WALK}"
            check(villain.post(path, content=template.replace("%s", value), headers=headers), name)


BAD_HEADERS = {
    "a long id": ("x-session-id: " + "x" * 129, "mcp-session-id: " + "x" * 129),
    "no id": ("x-session-id:", "mcp-session-id:"),
    "an id of no characters": ("x-session-id: \xff\xfe", "mcp-session-id: \xff\xfe"),
    "two ids": ("x-session-id: a", "x-session-id: b", "mcp-session-id: a", "mcp-session-id: b"),
    "an unknown version": ("x-session-id: a", "mcp-protocol-version: 1999-01-01"),
    "a version that is none": ("x-session-id: a", "mcp-protocol-version: \xff"),
    "nothing that can be accepted": ("x-session-id: a", "accept: image/png"),
}
CALL = b'{"name":"step","input":{"actions":["Left"]}}'
STEP = (TOOL % ("step", '{"actions":["Left"]}', "")).encode()
PATHS = {"/create": b"{}", "/ping": b"{}", f"/{WALK}/call": CALL, MCP: STEP, f"/mcp/{WALK}": STEP}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers(target: Target, player: Player, name: str) -> None:
    with unharmed(target, player):
        for path, body in PATHS.items():
            head = request(path, JSON, f"authorization: Bearer {VILLAIN}", f"content-length: {len(body)}")
            lines = "".join(f"{line}\r\n" for line in BAD_HEADERS[name]).encode("latin-1")
            status, reply = answer_to(target.url, head.removesuffix(b"\r\n") + lines + b"\r\n" + body)
            assert 200 <= status < 500, (path, reply)
            assert b"SERVER_BUG" not in reply


def answer_to(url: str, data: bytes) -> tuple[int, bytes]:
    """Send `data` like `answer`, but accept responses without a length: the connection must be closed after them."""
    return answer(url, data.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))


def test_paths_and_verbs(target: Target, player: Player) -> None:
    with unharmed(target, player) as villain:
        names = ("%ff", "%00", "%2e%2e", "..", "x" * 5_000, "%ed%a0%80", "none-v1", "a b")
        for name in names:
            for path in (f"/mcp/{name}/a", f"/mcp/{WALK}/{name}", f"/{name}/tools", f"/{name}/task", f"/{name}"):
                for verb in ("GET", "POST", "DELETE", "PUT"):
                    check(villain.request(verb, path, content=b'{"split":"train","index":1}'), (verb, path))


def test_bodies(target: Target, player: Player) -> None:
    wide = b'{"jsonrpc":"2.0","id":1,"method":"tools/list","a":[' + b"1," * 100_000 + b"1]}"
    with unharmed(target, player):
        for path in PATHS:
            for body, expected in ((b" " * (5 * MEBIBYTE), 413), (wide, 400), (b"\xff\xfe{}", 400), (b"[1]", 400)):
                data = sized(body, "x-session-id: a", "accept: application/json", path=path)
                status, reply = answer(target.url, data)
                assert status == expected, (path, body[:20], reply[:500])


def test_hang_ups(target: Target, player: Player) -> None:
    """Clients hang up in the middle of a request's body, and in the middle of a response's events."""
    with unharmed(target, player) as villain:
        session = {"x-session-id": "leaving"}
        villain.post("/create", json={"env_name": WALK, "task_spec": {"seed": 1}}, headers=session)
        for path, body in PATHS.items():
            whole = sized(body, "x-session-id: leaving", "accept: application/json", path=path)
            for data in [whole, whole[:-5]] * 25:
                with socket.create_connection(address_of(target.url)) as connection:
                    connection.sendall(data)
        turn = {"name": "step", "input": {"actions": ["Left"]}}
        assert '"ok": true' in villain.post(f"/{WALK}/call", json=turn, headers=session).text
