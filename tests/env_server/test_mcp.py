"""MCP over real sockets: the SDK's client in both eras of the protocol, and bare requests where a client hides them."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from mcp.client import Client as McpClient

from starpod.env_server import Environment, EnvironmentSpec, Outcome, Tool, ToolCall
from starpod.env_server.config import HTTP, ServerConfig, ServerLimits
from starpod.env_server.limits import Quota
from starpod.env_server.registry import Registry
from starpod.env_server.server import EnvironmentServer, ServerError
from starpod.environments.frozen_lake import FrozenLake
from tests.env_server.troublesome import Waiting, Walk

Serve = Callable[..., Awaitable[str]]
MODERN, HANDSHAKE = "auto", "legacy"


class Desk(Environment):
    """Its only actions are calls of a tool."""

    spec = EnvironmentSpec(
        id="desk-v1",
        version="1.0.0",
        title="A desk",
        tools=(
            Tool(
                "write",
                "Writes a word down.",
                {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
            ),
        ),
    )

    def reset(self, rng: Any) -> None:
        self.words: list[str] = []

    def step(self, action: ToolCall) -> Outcome:  # type: ignore[override]
        self.words.append(action.arguments["word"])
        return Outcome(reward=1.0)

    def render(self, mode: str = "text") -> str:
        return " ".join(self.words) or "nothing"


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers; gives the URL of MCP."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**config: Any) -> str:
            environments = (FrozenLake, Walk, Waiting, Desk)
            settings = ServerConfig(port=0, http=HTTP(0, mcp=True), **config)
            server = EnvironmentServer(Registry(environments), settings)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            return f"{server.http_address}/mcp"

        yield start


def texts(result: Any) -> list[str]:
    return [part.text for part in result.content if part.type == "text"]


@pytest.mark.parametrize("mode", [MODERN, HANDSHAKE])
async def test_an_episode(serve: Serve, mode: Any) -> None:
    url = await serve()
    async with McpClient(f"{url}/frozen_lake-v1/one", mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"reset", "observe", "step", "fork", "close"}
        assert tools["step"].input_schema["properties"]["actions"]["items"]["enum"] == ["Left", "Down", "Right", "Up"]
        schema = tools["reset"].input_schema
        jsonschema.Draft202012Validator(schema).validate({"seed": 3, "options": {"success_rate": 1.0}})
        assert not jsonschema.Draft202012Validator(schema).is_valid({"options": {"success_rate": "ice"}})
        early = await client.call_tool("step", {"actions": ["Right"]})
        assert early.is_error and "call reset" in texts(early)[0]
        began = await client.call_tool("reset", {"seed": 3, "options": {"success_rate": 1.0}, "image": True})
        assert [part.type for part in began.content].count("image") == 1
        played = await client.call_tool("step", {"actions": ["Right"]})
        assert played.structured_content["next_step_index"] == 1
        shown = await client.call_tool("observe", {})
        picture = await client.call_tool("observe", {"image": True})
        assert [part.type for part in picture.content] == ["image"]
        assert (await client.call_tool("fork", {"name": "two"})).structured_content["next_step_index"] == 1
        async with McpClient(f"{url}/frozen_lake-v1/two", mode=mode) as other:
            assert texts(await other.call_tool("observe", {})) == texts(shown)
            await other.call_tool("step", {"actions": ["Down"]})
        assert texts(await client.call_tool("observe", {})) == texts(shown)
        taken = await client.call_tool("fork", {"name": "two"})
        assert taken.is_error and "in use" in texts(taken)[0]
        await client.call_tool("close", {})
        assert (await client.call_tool("step", {"actions": ["Right"]})).is_error


@pytest.mark.parametrize("mode", [MODERN, HANDSHAKE])
async def test_a_step_index_makes_a_turn_safe_to_repeat(serve: Serve, mode: Any) -> None:
    url = await serve()
    async with McpClient(f"{url}/walk-v1/one", mode=mode) as client:
        await client.call_tool("reset", {"seed": 1})
        step = {"actions": ["Right"], "step_index": 0}
        first = await client.call_tool("step", step)
        async with McpClient(f"{url}/walk-v1/one", mode=mode) as again:  # after a lost connection, say
            assert (await again.call_tool("step", step)).content == first.content
            other = await again.call_tool("step", {"actions": ["Left"], "step_index": 0})
        assert other.is_error and other.structured_content["details"][0]["reason"] == "OUT_OF_ORDER"
        second = await client.call_tool("step", {"actions": ["Right"], "step_index": 1})
        assert second.structured_content["next_step_index"] == 2


async def test_programs_bring_what_tools_have_no_arguments_for(serve: Serve) -> None:
    """Further fields of the request in `_meta`; the contract's reply comes back there."""
    url = await serve()
    async with McpClient(f"{url}/walk-v1/one") as client:

        async def call(tool: str, arguments: dict[str, Any], **fields: Any) -> Any:
            result = await client.call_tool(tool, arguments, meta={"starpod.v1/request": fields})  # type: ignore[typeddict-unknown-key]
            return result.structured_content if result.is_error else result.meta["starpod.v1/reply"]

        limits = {"max_turns": 2}
        began = await call("reset", {"seed": 1}, dynamics_seed="7", limits=limits, want={"state_key": True})
        (session,) = began["sessions"]
        assert (session["seed"], session["dynamics_seed"]) == ("1", "7")
        assert session["observation"]["state_key"]
        assert began["limits"]["max_turns"] == 2
        stale = await call("step", {"actions": ["Right"], "step_index": 0}, epoch=2)
        assert stale["details"][0]["reason"] == "OUT_OF_ORDER"
        await call("step", {"step_index": 0}, actions=[{"text": "Right"}])
        last = await call("step", {"actions": ["Right"], "step_index": 1})
        assert last["transition"]["end_reason"] == "END_REASON_MAX_TURNS"
        again = await call("reset", {}, epoch=1, seed="1")
        assert again["session"]["observation"]["state_key"] == session["observation"]["state_key"]
        for wrong in ({"limits": 3}, {"count": 2}):
            async with McpClient(f"{url}/walk-v1/other") as other:
                refused = await other.call_tool("reset", {}, meta={"starpod.v1/request": wrong})  # type: ignore[typeddict-unknown-key]
            assert refused.structured_content["details"][0]["reason"] == "BAD_ARGUMENT"
        plain = await client.call_tool("observe", {})
        assert "starpod.v1/reply" not in (plain.meta or {})


class Bare:
    """A caller of the handshake's era who numbers its requests itself."""

    def __init__(self, caller: httpx.AsyncClient) -> None:
        self._caller = caller
        self.headers = {"accept": "application/json, text/event-stream"}

    async def send(self, number: int, method: str, **params: Any) -> Any:
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        response = await self._caller.post("", json=request, headers=self.headers)
        self.headers.setdefault("mcp-session-id", response.headers.get("mcp-session-id", ""))
        assert response.status_code == 200, response.text
        return response.json()

    async def begin(self) -> None:
        client = {"name": "bare", "version": "1"}
        await self.send(0, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        await self._caller.post("", json=initialized, headers=self.headers)

    async def call(self, number: int, tool: str, **arguments: Any) -> Any:
        return (await self.send(number, "tools/call", name=tool, arguments=arguments))["result"]


async def test_the_same_request_in_an_mcp_session_is_played_once(serve: Serve) -> None:
    async with httpx.AsyncClient(base_url=f"{await serve()}/walk-v1", trust_env=False, timeout=30) as caller:
        bare = Bare(caller)
        await bare.begin()
        await bare.call(1, "reset", seed=1)
        first = await bare.call(2, "step", actions=["Right"])
        assert await bare.call(2, "step", actions=["Right"]) == first
        assert (await bare.call(3, "step", actions=["Right"]))["structuredContent"]["next_step_index"] == 2
        other = Bare(caller)  # another session of MCP has another session of the environment
        await other.begin()
        assert (await other.call(2, "step", actions=["Right"]))["isError"]


@pytest.mark.parametrize("same", [True, False], ids=["by its request id", "by what it asks"])
async def test_a_fork_asked_for_again_is_the_same(serve: Serve, same: bool) -> None:
    """While nobody has played the copy: then its name is in use."""
    async with httpx.AsyncClient(base_url=f"{await serve()}/walk-v1/one", trust_env=False, timeout=30) as caller:
        bare = Bare(caller)
        await bare.begin()
        await bare.call(1, "reset", seed=1)
        await bare.call(2, "step", actions=["Right"])
        first = await bare.call(3, "fork", name="two")
        assert not first["isError"]
        assert await bare.call(3 if same else 4, "fork", name="two") == first
        at_two = httpx.URL(str(caller.base_url).removesuffix("one/") + "two")
        played = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "step"}}
        played["params"]["arguments"] = {"actions": ["Right"]}  # type: ignore[index]
        moved = (await caller.post(at_two, json=played, headers=bare.headers)).json()["result"]
        assert moved["structuredContent"]["next_step_index"] == 2
        assert "in use" in (await bare.call(5, "fork", name="two"))["content"][0]["text"]
        assert not (await bare.call(6, "fork", name="three"))["isError"]
        await bare.call(7, "step", actions=["Right"])
        assert "in use" in (await bare.call(8, "fork", name="three"))["content"][0]["text"]  # it is of another turn


async def test_a_tokens_sessions_leave_others_theirs(serve: Serve, tmp_path: Path) -> None:
    """Clients of the older protocol begin as many sessions of MCP as they like; those of environments are counted."""
    tokens = tmp_path / "tokens"
    tokens.write_text("secret-one name=one\nsecret-two name=two\n")
    url = await serve(token_file=tokens, quota=Quota(sessions=2), limits=ServerLimits(max_sessions=8))
    async with httpx.AsyncClient(base_url=f"{url}/walk-v1", trust_env=False, timeout=30) as caller:

        async def begun(token: str) -> Bare:
            bare = Bare(caller)
            bare.headers["authorization"] = f"Bearer secret-{token}"
            await bare.begin()
            return bare

        greedy = [await begun("one") for _ in range(20)]
        assert len({bare.headers["mcp-session-id"] for bare in greedy}) == 20
        results = [await bare.call(1, "reset", seed=1) for bare in greedy]
        assert [result["isError"] for result in results] == [False] * 2 + [True] * 18
        info, retry = results[2]["structuredContent"]["details"]
        assert (info["reason"], info["metadata"]["limit"]) == ("OVERLOADED", "token_sessions")
        assert retry["retry_delay"]
        assert not (await (await begun("two")).call(1, "reset", seed=1))["isError"]
        assert not (await greedy[0].call(2, "step", actions=["Right"]))["isError"]


async def test_to_begin_sessions_of_mcp_is_to_call(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret-one name=one\n")
    url = await serve(token_file=tokens, quota=Quota(calls_per_second=0.5))
    headers = {"authorization": "Bearer secret-one", "accept": "application/json"}
    ask = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30) as caller:
        replies = [await caller.post("/walk-v1", json=ask) for _ in range(5)]
    refused = replies[-1]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    info = refused.json()["details"][0]
    assert (info["reason"], info["metadata"]["limit"]) == ("OVERLOADED", "token_calls_per_second")


async def test_a_caller_who_leaves_has_played_its_turn_once(serve: Serve) -> None:
    url = await serve()
    async with McpClient(f"{url}/waiting-v1/one") as client:
        await client.call_tool("reset", {})
        leaving = asyncio.create_task(client.call_tool("step", {"actions": ["gate"], "step_index": 0}))
        assert await asyncio.to_thread(Waiting.entered.wait, 30)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        Waiting.opened.set()
        again = await client.call_tool("step", {"actions": ["gate"], "step_index": 0})
        assert again.structured_content["next_step_index"] == 1
        assert (await client.call_tool("step", {"actions": ["0"]})).structured_content["next_step_index"] == 2


async def test_an_environments_own_tools(serve: Serve) -> None:
    url = await serve()
    async with McpClient(f"{url}/desk-v1/one") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert "step" not in tools
        assert set(tools["write"].input_schema["properties"]) == {"word", "step_index"}
        await client.call_tool("reset", {})
        call = {"word": "ink", "step_index": 0}
        written = await client.call_tool("write", call)
        assert texts(written)[0] == "ink" and written.structured_content["reward"] == 1.0
        assert texts(await client.call_tool("write", call))[0] == "ink"
        assert texts(await client.call_tool("write", {"word": "well"}))[0] == "ink well"
        assert (await client.call_tool("nothing", {})).is_error


async def test_wrong_arguments_change_nothing(serve: Serve) -> None:
    url = await serve(limits=ServerLimits(max_sessions=1))
    async with McpClient(f"{url}/walk-v1/one") as client:
        await client.call_tool("reset", {"seed": 1})
        for tool, arguments in (
            ("step", {}),
            ("step", {"actions": "Right"}),
            ("step", {"actions": [1]}),
            ("step", {"actions": ["Right"], "step_index": -1}),
            ("step", {"actions": ["Right"], "step_index": True}),
            ("reset", {"seed": "x"}),
            ("reset", {"options": [1]}),
            ("fork", {"name": "a/b"}),
            ("fork", {"name": "one"}),
            ("fork", {"name": "two"}),  # beyond max_sessions
        ):
            assert (await client.call_tool(tool, arguments)).is_error, (tool, arguments)
        played = await client.call_tool("step", {"actions": ["Right"], "step_index": 0})
        assert played.structured_content["next_step_index"] == 1


async def test_tokens_hosts_and_bodies_are_those_of_http(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret-one name=one\nsecret-two name=two\n")
    url = await serve(token_file=tokens)
    ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    one = {"authorization": "Bearer secret-one", "accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as caller:
        assert (await caller.post("/walk-v1/a", json=ask)).status_code == 401
        assert (await caller.post("/walk-v1/a", json=ask, headers={**one, "host": "evil.example"})).status_code == 421
        assert (await caller.get("/walk-v1/a", headers=one)).status_code == 405
        assert (await caller.delete("/walk-v1/a", headers=one)).status_code == 405
        assert (await caller.post("/none-v1/a", json=ask, headers=one)).status_code == 404
        assert (await caller.post(f"/walk-v1/{'n' * 129}", json=ask, headers=one)).status_code == 400
        longer = {**one, "mcp-session-id": "n" * 129}
        assert (await caller.post("/walk-v1", json=ask, headers=longer)).status_code == 400
        wide = b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"a":[' + b"1," * 100_000 + b"1]}}"
        body = {**one, "content-type": "application/json"}
        assert (await caller.post("/walk-v1/a", content=wide, headers=body)).status_code == 400
        assert (await caller.post("/walk-v1/a", content=b"{}", headers=one)).status_code == 415
        bares = [Bare(caller), Bare(caller)]
        for bare, token in zip(bares, ("one", "two"), strict=True):
            bare.headers["authorization"] = f"Bearer secret-{token}"
            caller.base_url = httpx.URL(f"{url}/walk-v1/shared")
            await bare.begin()
        await bares[0].call(1, "reset", seed=1)
        assert (await bares[1].call(1, "step", actions=["Right"]))["isError"]  # a name is a tenant's own


async def test_a_missing_package_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starpod.env_server.mcp.service", None)
    with pytest.raises(ServerError, match=r"--mcp needs its extra; .* '\.\[mcp\]'"):
        await serve()
