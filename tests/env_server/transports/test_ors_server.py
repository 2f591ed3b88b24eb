"""The Open Reward Standard over real sockets: episodes as its clients play them, and calls that are made once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from starpod.env_server import Environment, EnvironmentSpec, Outcome
from starpod.env_server.hosting.ors import host
from starpod.env_server.operation.config import HTTP, ServerLimits
from starpod.environments.frozen_lake import FrozenLake
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Serve, text_of
from tests.env_server.transports.test_mcp import Desk
from tests.env_server.troublesome import Waiting, Walk
from tests.support import start_server

ServeOrs = Callable[..., Awaitable["Caller"]]
LAKE = "frozen_lake-v1"
SURROGATE = "\ud800"


class Forging(Environment):
    """An environment whose error message would be read as two events."""

    spec = EnvironmentSpec(id="forging-v1", version="1.0.0", title="Forging", actions=("go",))

    def reset(self, rng: Any) -> None: ...

    def step(self, action: str) -> Outcome:
        raise ValueError('no\n\nevent: end\ndata: {"ok": true}')

    def render(self, mode: str = "text") -> str:
        return "here"


class Caller:
    """A client of the standard, with one session."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.headers = {"content-type": "application/json"}

    async def begin(self, environment: str, **task: Any) -> Any:
        (told, id), (ended, _) = await self.events("/create_session", {})
        assert (told, ended) == ("task_id", "end")
        self.headers["x-session-id"] = id
        return await self.post("/create", {"env_name": environment, **task})

    async def post(self, path: str, body: Any = None) -> Any:
        response = await self._send(path, body)
        return response.json() if response.is_success else response

    async def get(self, path: str) -> Any:
        return (await self.http.get(path, headers=self.headers)).json()

    async def events(self, path: str, body: Any) -> list[tuple[str, str]]:
        response = await self._send(path, body)
        assert response.is_success, response.text
        blocks = response.text.strip().split("\n\n")
        return [(name[7:], data[6:]) for name, data in (block.split("\n", 1) for block in blocks)]

    async def _send(self, path: str, body: Any) -> httpx.Response:
        data = None if body is None else json.dumps(body)  # which can spell what UTF-8 cannot
        return await self.http.post(path, content=data, headers=self.headers)

    async def call(self, environment: str, tool: str, arguments: Any, **more: Any) -> tuple[str, Any]:
        """The call's id and result."""
        events = await self.events(f"/{environment}/call", {"name": tool, "input": arguments, **more})
        assert events[0][0] == "task_id" and events[-1][0] == "end", events
        return events[0][1], json.loads("".join(data for name, data in events if name in ("chunk", "end")))


@pytest.fixture
async def serve_ors(serve: Serve) -> AsyncIterator[ServeOrs]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(token: str = "", **config: Any) -> Caller:
            client = await serve(FrozenLake, Desk, Waiting, Walk, Forging, http=HTTP(0, ors=True), **config)
            headers = {"x-api-key": token} if token else {}
            http = httpx.AsyncClient(base_url=client.server.http_address, headers=headers)
            return Caller(await stack.enter_async_context(http))

        yield start


async def test_an_episode(serve_ors: ServeOrs) -> None:
    caller = await serve_ors()
    assert LAKE in await caller.get("/list_environments")
    assert [split["name"] for split in await caller.get(f"/{LAKE}/splits")] == ["train", "test"]
    assert await caller.post(f"/{LAKE}/num_tasks", {"split": "train"}) == {"num_tasks": 1000}
    ranged = await caller.post(f"/{LAKE}/task_range", {"split": "test", "start": -2, "stop": None})
    assert ranged == {"tasks": [{"seed": 1_000_198}, {"seed": 1_000_199}], "env_name": LAKE}
    tools = {tool["name"]: tool for tool in (await caller.get(f"/{LAKE}/tools"))["tools"]}
    assert list(tools) == ["step"]
    assert tools["step"]["input_schema"]["properties"]["actions"]["items"]["enum"] == ["Left", "Down", "Right", "Up"]

    await caller.begin(LAKE, task_spec={"seed": 3, "options": {"success_rate": 1.0}})
    prompt = await caller.get(f"/{LAKE}/prompt")
    assert [block["type"] for block in prompt] == ["text", "text"]
    opened = await caller.post(
        "/v1/sessions:open",
        {"environment_id": LAKE, "seed": 3, "options": {"success_rate": 1}, "want": {"expert_action": True}},
    )
    session = opened["sessions"][0]
    assert prompt == [{"type": "text", "text": text} for text in (opened["instructions"], _text(session))]
    turn, seen = 0, session["observation"]
    finished = False
    while not finished:
        actions = [seen["expert_action"]["text"]]
        step = {"epoch": 1, "step_index": turn, "actions": [{"text": each} for each in actions]}
        expected = (await caller.post(f"/v1/sessions/{session['session_id']}:step", step))["transition"]
        id, result = await caller.call(LAKE, "step", {"actions": actions})
        output = result["output"]
        assert (id, output["blocks"]) == (str(turn), [{"type": "text", "text": _text(expected)}])
        assert (output["reward"], output["finished"]) == (expected["reward"], expected["terminated"])
        turn, seen, finished = turn + 1, expected["observation"], output["finished"]
    assert output["metadata"]["success"] is True and output["reward"] > 0
    _, over = await caller.call(LAKE, "step", {"actions": ["Up"]})
    assert (over["ok"], over["reason"]) == (False, "episode_finished")
    await caller.post("/delete")
    assert (await caller.post("/ping")).status_code == 404


def _text(shown: Any) -> str:
    (part,) = shown["observation"]["parts"]
    return str(part["text"])


async def test_a_call_is_made_once_however_often_it_is_asked_for(serve_ors: ServeOrs) -> None:
    caller = await serve_ors()
    await caller.begin("desk-v1", split="train", index=5)
    id, first = await caller.call("desk-v1", "write", {"word": "one"})
    for _ in range(2):
        assert await caller.call("desk-v1", "write", {"word": "one"}, task_id=id) == (id, first)
    _, second = await caller.call("desk-v1", "write", {"word": "two"})
    assert second["output"]["blocks"] == [{"type": "text", "text": "one two"}]
    assert await caller.call("desk-v1", "write", {"word": "two"}, task_id="1") == ("1", second)
    events = await caller.events("/desk-v1/call", {"name": "write", "input": {"word": "other"}, "task_id": "1"})
    assert events[-1][0] == "error" and "OUT_OF_ORDER" in events[-1][1]
    again = await caller.post("/create", {"env_name": "desk-v1", "split": "train", "index": 5})
    assert again == {"sid": caller.headers["x-session-id"]}
    _, third = await caller.call("desk-v1", "write", {"word": "three"})
    assert third["output"]["blocks"][0]["text"] == "one two three"


async def test_a_hang_up_cancels_no_turn(serve_ors: ServeOrs) -> None:
    caller = await serve_ors()
    await caller.begin("waiting-v1", task_spec={"seed": 1})
    call = {"name": "step", "input": {"actions": ["gate"]}}
    with pytest.raises(httpx.ReadTimeout):
        await caller.http.post("/waiting-v1/call", json=call, headers=caller.headers, timeout=0.2)
    Waiting.opened.set()
    for action, again, seen in (("gate", {"task_id": "0"}, "gate"), ("1", {}, "gate,1")):
        _, result = await caller.call("waiting-v1", "step", {"actions": [action]}, **again)
        assert result["output"]["blocks"][0]["text"] == seen


async def test_wrong_calls_are_the_policys(serve_ors: ServeOrs) -> None:
    caller = await serve_ors()
    await caller.begin("desk-v1", split="train", index=0)
    assert (await caller.call("desk-v1", "fly", {}))[1]["reason"] == "not_found"
    assert (await caller.call("desk-v1", "write", {"word": SURROGATE}))[1]["reason"] == "input_validation"
    await caller.begin(LAKE, split="train", index=0)
    for actions in ("Up", [1], [SURROGATE]):
        assert (await caller.call(LAKE, "step", {"actions": actions}))[1]["reason"] == "input_validation"
    assert (await caller.call(LAKE, "step", {"actions": ["Up"]}))[0] == "0"


@pytest.mark.parametrize(
    ("environment", "action", "told"),
    [("forging-v1", "go", "ENVIRONMENT_BUG"), ("walk-v1", "bug", "a bug on purpose")],
)
async def test_a_bug_is_no_result(serve_ors: ServeOrs, environment: str, action: str, told: str) -> None:
    caller = await serve_ors()
    await caller.begin(environment, split="train", index=0)
    (task, _), (error, text) = await caller.events(
        f"/{environment}/call", {"name": "step", "input": {"actions": [action]}}
    )
    assert (task, error) == ("task_id", "error") and told in text


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/create", {"env_name": "nothing-v1", "split": "train", "index": 0}, 404, "nothing-v1"),
        ("/create", {"env_name": LAKE, "split": "dev", "index": 0}, 400, "there are train, test"),
        ("/create", {"env_name": LAKE, "split": "test", "index": 200}, 400, "not a whole number from 0 to 199"),
        ("/create", {"env_name": LAKE, "task_spec": {"seed": -1}}, 400, "not a whole number"),
        ("/create", {"env_name": LAKE, "task_spec": {"seed": 1, "options": {"size": "big"}}}, 400, "size"),
        ("/create", {"env_name": LAKE, "task_spec": {"seed": 1}, "toolset_name": "codex"}, 400, "toolset_name"),
        ("/create", {"env_name": LAKE, "task_spec": {"seed": 1, "options": {"size": SURROGATE}}}, 400, "surrogates"),
        ("/create", {"env_name": LAKE, "task_spec": {"seed": 1, "options": {SURROGATE: 1}}}, 400, "surrogates"),
        ("/create", {"env_name": 5, "task_spec": {"seed": 1}}, 400, "env_name: is not text"),
        ("/create", {"env_name": ["a"], "task_spec": {"seed": 1}}, 400, "env_name: is not text"),
        (f"/{LAKE}/task", {"split": []}, 400, "split: is not text"),
        (f"/{LAKE}/task_range", {"split": "train", "start": "a"}, 400, "start: is not a whole number"),
        (f"/{LAKE}/task_range", {"split": "train", "stop": 1.5}, 400, "stop: is not a whole number"),
        ("/fly", {}, 404, "there is no POST"),
        (f"/{LAKE}/call", {"name": "step", "input": {}}, 404, "create it first"),
        (f"/{LAKE}/fly", {}, 404, "there is no POST"),
        *(  # ids that no call has
            ("/desk-v1/call", {"name": "write", "input": {"word": "one"}, "task_id": id}, 400, "none that this server")
            for id in ("9" * 20, "9" * 5_000, str(2**32), "-1", "\u0663", 0, [], True)
        ),
    ],
)
async def test_refusals_have_a_reason(serve_ors: ServeOrs, path: str, body: Any, status: int, told: str) -> None:
    """The request is refused before the response begins, and the session continues."""
    caller = await serve_ors()
    if "task_id" in body:
        await caller.begin("desk-v1", split="train", index=5)
    else:
        caller.headers["x-session-id"] = "mine"
    response = await caller.post(path, body)
    assert response.status_code == status and told in response.text
    if "task_id" in body:
        assert (await caller.call("desk-v1", "write", {"word": "one"}))[0] == "0"


async def test_a_deleted_id_is_not_created_again(serve_ors: ServeOrs) -> None:
    caller = await serve_ors()
    task = {"env_name": "desk-v1", "split": "train", "index": 5}
    caller.headers["x-session-id"] = "mine"
    for _ in range(2):
        assert await caller.post("/create", task) == {"sid": "mine"}
    await caller.post("/delete")
    refused = await caller.post("/create", task)
    assert refused.status_code == 404 and "deleted" in refused.text and "use a new id" in refused.text
    caller.headers["x-session-id"] = "another"
    assert await caller.post("/create", task) == {"sid": "another"}
    assert (await caller.call("desk-v1", "write", {"word": "one"}))[1]["ok"]


async def test_tokens_and_limits_hold(serve_ors: ServeOrs, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-long-enough-token\n")
    known = await serve_ors(token="a-long-enough-token", token_file=tokens, limits=ServerLimits(max_sessions=2))
    for _ in range(2):
        await known.begin(LAKE, split="train", index=0)
    assert (await known.call(LAKE, "step", {"actions": ["Right"]}))[1]["ok"]
    refused = await known.begin(LAKE, split="train", index=0)
    assert refused.status_code == 429 and refused.headers["retry-after"]
    known.http.headers.pop("x-api-key")
    assert (await known.http.get("/list_environments")).status_code == 401


async def test_what_it_serves_is_hosted_again(serve: Serve) -> None:
    """Our own hosting of such servers plays our own server of it."""
    with start_server("frozen_lake", "--http", "0", "--ors-server") as inner:
        url = inner.ready.split("as JSON at ")[1].split(",")[0]
        hosted = await asyncio.to_thread(host, f"{url}/{LAKE}#deterministic=yes")
        outer, own = await serve(hosted), await serve(FrozenLake)
        there, here = await outer.open(hosted.spec.id, seed=3), await own.open(LAKE, seed=3)
        for index, action in enumerate(("Right", "Down", "Right")):
            call = pb.ToolCall(name="step", arguments_json=json.dumps({"actions": [action]}))
            reply = await outer.ask("Step", there, epoch=1, step_index=index, actions=[pb.Action(tool_call=call)])
            expected = await own.step(here, index, action)
            assert (text_of(reply.transition), reply.transition.reward) == (text_of(expected), expected.reward)
        await outer.close(there)  # while the inner server can still be reached
