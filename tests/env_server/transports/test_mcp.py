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
from starpod.env_server.operation.config import HTTP, ServerLimits
from starpod.env_server.operation.tenants import Quota
from starpod.env_server.server.listening import ServerError
from starpod.environments.frozen_lake import FrozenLake
from tests.env_server.conftest import Serve, entered
from tests.env_server.troublesome import Waiting, Walk

ServeMcp = Callable[..., Awaitable[str]]
MODERN, HANDSHAKE = "auto", "legacy"


class Desk(Environment):
    """An environment whose only actions are tool calls."""

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
def serve_mcp(serve: Serve) -> ServeMcp:
    """Starts servers; gives the URL of MCP."""

    async def start(**config: Any) -> str:
        client = await serve(FrozenLake, Walk, Waiting, Desk, http=HTTP(0, mcp=True), **config)
        return f"{client.server.http_address}/mcp"

    return start


def texts(result: Any) -> list[str]:
    return [part.text for part in result.content if part.type == "text"]


async def mcp(url: str, tool: str, **arguments: Any) -> Any:
    """Call a tool with a new client, and return the result."""
    async with McpClient(url) as client:
        return await client.call_tool(tool, arguments)


def next_of(result: Any) -> int:
    """The index of the next step."""
    facts = result["structuredContent"] if isinstance(result, dict) else result.structured_content
    return int(facts["next_step_index"])


@pytest.mark.parametrize("mode", [MODERN, HANDSHAKE])
async def test_an_episode(serve_mcp: ServeMcp, mode: Any) -> None:
    url = f"{await serve_mcp()}/frozen_lake-v1"
    async with McpClient(f"{url}/one", mode=mode) as client, McpClient(f"{url}/two", mode=mode) as other:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"reset", "observe", "step", "fork", "close"}
        assert tools["step"].input_schema["properties"]["actions"]["items"]["enum"] == ["Left", "Down", "Right", "Up"]
        validator = jsonschema.Draft202012Validator(tools["reset"].input_schema)
        validator.validate({"seed": 3, "options": {"success_rate": 1.0}})
        assert not validator.is_valid({"options": {"success_rate": "ice"}})
        early = await client.call_tool("step", {"actions": ["Right"]})
        assert early.is_error and "call reset" in texts(early)[0]
        began = await client.call_tool("reset", {"seed": 3, "options": {"success_rate": 1.0}, "image": True})
        assert [part.type for part in began.content].count("image") == 1
        step = {"actions": ["Right"], "step_index": 0}
        played = await client.call_tool("step", step)
        assert next_of(played) == 1
        async with McpClient(f"{url}/one", mode=mode) as again:  # after a lost connection, say
            assert (await again.call_tool("step", step)).content == played.content
            wrong = await again.call_tool("step", {"actions": ["Left"], "step_index": 0})
        assert wrong.is_error and wrong.structured_content["details"][0]["reason"] == "OUT_OF_ORDER"
        shown = await client.call_tool("observe", {})
        picture = await client.call_tool("observe", {"image": True})
        assert [part.type for part in picture.content] == ["image"]
        assert next_of(await client.call_tool("fork", {"name": "two"})) == 1
        assert texts(await other.call_tool("observe", {})) == texts(shown)
        await other.call_tool("step", {"actions": ["Down"]})
        assert texts(await client.call_tool("observe", {})) == texts(shown)
        taken = await client.call_tool("fork", {"name": "two"})
        assert taken.is_error and "in use" in texts(taken)[0]
        await client.call_tool("close", {})
        assert (await client.call_tool("step", {"actions": ["Right"]})).is_error


async def test_programs_bring_what_tools_have_no_arguments_for(serve_mcp: ServeMcp) -> None:
    """Further fields of the request in `_meta`; the contract's reply comes back there."""
    url = await serve_mcp()
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
        await client.call_tool("close", {})
        for wrong in ({"limits": 3}, {"count": 2}):
            assert (await call("reset", {}, **wrong))["details"][0]["reason"] == "BAD_ARGUMENT"
        assert "starpod.v1/reply" not in ((await client.call_tool("observe", {})).meta or {})


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


@contextlib.asynccontextmanager
async def callers(url: str, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30) as caller:
        yield caller


async def begun(caller: httpx.AsyncClient, token: str = "") -> Bare:
    bare = Bare(caller)
    if token:
        bare.headers["authorization"] = f"Bearer {token}"
    await bare.begin()
    return bare


async def test_the_same_request_in_an_mcp_session_is_played_once(serve_mcp: ServeMcp) -> None:
    async with callers(f"{await serve_mcp()}/walk-v1") as caller:
        bare = await begun(caller)
        await bare.call(1, "reset", seed=1)
        first = await bare.call(2, "step", actions=["Right"])
        assert await bare.call(2, "step", actions=["Right"]) == first
        assert next_of(await bare.call(3, "step", actions=["Right"])) == 2
        other = await begun(caller)  # another session of MCP has another session of the environment
        assert (await other.call(2, "step", actions=["Right"]))["isError"]


@pytest.mark.parametrize("number", [3, 4], ids=["by its request id", "by what it asks"])
async def test_a_fork_asked_for_again_is_the_same(serve_mcp: ServeMcp, number: int) -> None:
    """This holds until somebody plays the copy. Then its name is in use."""
    url = f"{await serve_mcp()}/walk-v1"
    async with callers(f"{url}/one") as caller:
        bare = await begun(caller)
        await bare.call(1, "reset", seed=1)
        await bare.call(2, "step", actions=["Right"])
        first = await bare.call(3, "fork", name="two")
        assert not first["isError"]
        assert await bare.call(number, "fork", name="two") == first
        assert next_of(await mcp(f"{url}/two", "step", actions=["Right"])) == 2
        assert "in use" in (await bare.call(5, "fork", name="two"))["content"][0]["text"]
        assert not (await bare.call(6, "fork", name="three"))["isError"]
        await bare.call(7, "step", actions=["Right"])
        assert "in use" in (await bare.call(8, "fork", name="three"))["content"][0]["text"]  # it is of another turn


async def test_of_two_forks_to_one_name_at_once_one_is_refused(serve: Serve) -> None:
    client = await serve(Waiting, http=HTTP(0, mcp=True))
    url = f"{client.server.http_address}/mcp/waiting-v1"
    async with callers(f"{url}/one") as one, callers(f"{url}/two") as two:
        parents = [await begun(one), await begun(two)]
        for parent in parents:
            await parent.call(1, "reset", seed=1)
        for number in range(5):
            replies = await asyncio.gather(*(parent.call(2 + number, "fork", name=f"{number}") for parent in parents))
            assert sorted(reply["isError"] for reply in replies) == [False, True]
            assert await client.live() == 3 + number


TOKENS = "secret-one name=one\nsecret-two name=two\n"


async def test_a_tokens_sessions_leave_others_theirs(serve_mcp: ServeMcp, tmp_path: Path) -> None:
    """Clients of the older protocol begin as many sessions of MCP as they like; those of environments are counted."""
    (tmp_path / "tokens").write_text(TOKENS)
    limits = ServerLimits(max_sessions=8)
    url = await serve_mcp(token_file=tmp_path / "tokens", quota=Quota(sessions=2), limits=limits)
    async with callers(f"{url}/walk-v1") as caller:
        greedy = [await begun(caller, "secret-one") for _ in range(10)]
        assert len({bare.headers["mcp-session-id"] for bare in greedy}) == 10
        results = [await bare.call(1, "reset", seed=1) for bare in greedy]
        assert [result["isError"] for result in results] == [False] * 2 + [True] * 8
        info, retry = results[2]["structuredContent"]["details"]
        assert (info["reason"], info["metadata"]["limit"]) == ("OVERLOADED", "token_sessions")
        assert retry["retry_delay"]
        assert not (await (await begun(caller, "secret-two")).call(1, "reset", seed=1))["isError"]
        assert not (await greedy[0].call(2, "step", actions=["Right"]))["isError"]


async def test_to_begin_sessions_of_mcp_is_to_call(serve_mcp: ServeMcp, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKENS)
    url = await serve_mcp(token_file=tmp_path / "tokens", quota=Quota(calls_per_second=0.5))
    ask = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with callers(url, authorization="Bearer secret-one", accept="application/json") as caller:
        *_, refused = [await caller.post("/walk-v1", json=ask) for _ in range(5)]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    info = refused.json()["details"][0]
    assert (info["reason"], info["metadata"]["limit"]) == ("OVERLOADED", "token_calls_per_second")


async def test_a_caller_who_leaves_has_played_its_turn_once(serve_mcp: ServeMcp) -> None:
    url = await serve_mcp()
    async with McpClient(f"{url}/waiting-v1/one") as client:
        await client.call_tool("reset", {})
        leaving = asyncio.create_task(client.call_tool("step", {"actions": ["gate"], "step_index": 0}))
        await entered()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        Waiting.opened.set()
        assert next_of(await client.call_tool("step", {"actions": ["gate"], "step_index": 0})) == 1
        assert next_of(await client.call_tool("step", {"actions": ["0"]})) == 2


async def test_an_environments_own_tools(serve_mcp: ServeMcp) -> None:
    url = await serve_mcp()
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


async def test_wrong_arguments_change_nothing(serve_mcp: ServeMcp) -> None:
    url = await serve_mcp(limits=ServerLimits(max_sessions=1))
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
        assert next_of(await client.call_tool("step", {"actions": ["Right"], "step_index": 0})) == 1


@pytest.mark.parametrize("want", [1, [1], "image", True])
async def test_a_want_that_is_no_object_is_a_bad_argument(serve_mcp: ServeMcp, want: Any) -> None:
    async with McpClient(f"{await serve_mcp()}/frozen_lake-v1/one") as client:
        meta: Any = {"starpod.v1/request": {"want": want}}
        for arguments in ({"image": True}, {}):
            result = await client.call_tool("reset", arguments, meta=meta)
            assert result.is_error
            assert result.structured_content["details"][0]["reason"] == "BAD_ARGUMENT"


async def test_tokens_hosts_and_bodies_are_those_of_http(serve_mcp: ServeMcp, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKENS)
    url = await serve_mcp(token_file=tmp_path / "tokens")
    ask = b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}'
    wide = ask.replace(b"{}", b'{"a":[' + b"1," * 100_000 + b"1]}")
    known = {"authorization": "Bearer secret-one", "accept": "application/json, text/event-stream"}
    async with callers(url) as caller:
        for status, method, path, body, changes in (
            (401, "POST", "walk-v1/a", ask, {"authorization": ""}),
            (421, "POST", "walk-v1/a", ask, {"host": "evil.example"}),
            (405, "GET", "walk-v1/a", b"", {}),
            (405, "DELETE", "walk-v1/a", b"", {}),
            (404, "POST", "none-v1/a", ask, {}),
            (400, "POST", f"walk-v1/{'n' * 129}", ask, {}),
            (400, "POST", "walk-v1", ask, {"mcp-session-id": "n" * 129}),
            (400, "POST", "walk-v1/a", wide, {}),
            (415, "POST", "walk-v1/a", b"{}", {"content-type": ""}),
        ):
            headers = {**known, "content-type": "application/json", **changes}
            response = await caller.request(method, path, content=body, headers=headers)
            assert response.status_code == status, (path, changes)
    async with callers(f"{url}/walk-v1/shared") as caller:
        one, two = [await begun(caller, f"secret-{name}") for name in ("one", "two")]
        await one.call(1, "reset", seed=1)
        assert (await two.call(1, "step", actions=["Right"]))["isError"]  # a name is a tenant's own


async def test_a_missing_package_is_named(serve_mcp: ServeMcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starpod.env_server.transports.mcp.service", None)
    with pytest.raises(ServerError, match=r"--mcp needs its extra; .* '\.\[mcp\]'"):
        await serve_mcp()
