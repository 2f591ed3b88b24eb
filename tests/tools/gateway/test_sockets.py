"""The gateway over real sockets, with OpenAI's own client and plain HTTP."""

import asyncio
import errno
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from starpod.gateway import app, records
from starpod.gateway.app import Keys, create_app
from starpod.gateway.control import endpoints
from starpod.gateway.records import Records
from starpod.gateway.session import Sampler
from starpod.serving import http
from starpod.serving.http import listening
from starpod.serving.sockets import listen
from starpod.trainer.data.episode import Turn
from starpod.trainer.data.files import read_episodes
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.base import EngineError
from tests.support import small_files
from tests.tools.gateway.sampling import engine_of, scripted

CALL = '<tool_call>\n{"name": "move", "arguments": {"to": "Up"}}\n</tool_call>'
USER = {"role": "user", "content": "go"}
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "name": "move", "parameters": SCHEMA, "strict": False}
OWN = {"name": "move", "description": "Moves.", "input_schema": SCHEMA}
TOOL, OTHER = ({"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("move", "look"))


@dataclass
class Gateway:
    """A gateway that listens, and clients of it: `http`, and `llm` of OpenAI, with the API key "one"."""

    url: str
    records: Records
    http: httpx.AsyncClient
    llm: openai.AsyncOpenAI

    def __iter__(self) -> Iterator[Any]:
        """Address and records, for those who need no client of ours."""
        return iter((self.url, self.records))

    async def post(self, path: str, body: Any = None, key: str = "one") -> httpx.Response:
        return await self.http.post(path, json=body or {}, headers={"authorization": f"Bearer {key}"})

    async def ask(self, text: str = "hello", key: str = "one", **more: Any) -> str:
        """The text of the reply to one message. Raises what OpenAI's client raises."""
        llm, messages = self.llm.with_options(api_key=key), [{"role": "user", "content": text}]
        completion = await llm.chat.completions.create(**{"model": "m", "messages": messages, **more})
        return str(completion.choices[0].message.content or "")

    def turns(self, name: str = "one") -> list[Turn]:
        return self.records.record(name).episode.turns


@asynccontextmanager
async def gateway(sampler: Sampler, folder: Path, token: str = "", **limits: Any) -> AsyncIterator[Gateway]:
    records = Records(sampler, folder, max_sessions=limits.pop("sessions", 100), begins_unknown=not token)
    records.restore()
    keys = Keys(token)
    application = create_app(records, model="test", keys=keys, more=endpoints(records, keys), **limits)
    async with (
        listening(application) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0, http_client=http) as llm,
    ):
        yield Gateway(url, records, http, llm)


def says(text: str, **sampling: int) -> Sampler:
    """A model that says the text, and "done" once a tool's result is "ok, moved"."""
    return scripted(lambda request, prompt: "done" if "ok, moved" in prompt else text, **sampling)


def data_of(stream: str) -> list[Any]:
    """The data of server-sent events, but for the word that ends a stream."""
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


# --- the APIs ---------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    thought: str | None
    text: str | None
    calls: list[tuple[str, Any]]
    finish: str


def read_chat(body: Any) -> Reply:
    (choice,) = body["choices"]
    message = choice["message"]
    called = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
    return Reply(message.get("reasoning_content"), message["content"], called, choice["finish_reason"])


def chat_back(body: Any) -> list[Any]:
    message = body["choices"][0]["message"]
    return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok, moved"}]


def read_response(body: Any) -> Reply:
    texts = {item["type"]: item["content"][0]["text"] for item in body["output"] if item["type"] != "function_call"}
    called = [(item["name"], json.loads(item["arguments"])) for item in body["output"] if "call_id" in item]
    return Reply(texts.get("reasoning"), texts.get("message"), called, body["status"])


def response_back(body: Any) -> list[Any]:
    result = {"type": "function_call_output", "call_id": body["output"][-1]["call_id"], "output": "ok, moved"}
    return [*body["output"], result]


def read_message(body: Any) -> Reply:
    thought, text = ("".join(block.get(kind, "") for block in body["content"]) or None for kind in ("thinking", "text"))
    called = [(block["name"], block["input"]) for block in body["content"] if block["type"] == "tool_use"]
    return Reply(thought, text, called, body["stop_reason"])


def message_back(body: Any) -> list[Any]:
    """Return the message without thoughts, which a client may omit."""
    content = [block for block in body["content"] if block["type"] != "thinking"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "ok, moved"}
    return [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]


@dataclass(frozen=True)
class Api:
    """A chat API. body: a request for a reply, with a tool. read: parses a reply. back: what a client appends after it.

    finishes: finish reasons of a reply with a tool call, and of one without. choices: values that demand a call.
    """

    path: str
    history: str
    body: dict[str, Any]
    read: Callable[[Any], Reply]
    back: Callable[[Any], list[Any]]
    finishes: tuple[str, str]
    choices: tuple[Any, Any]

    def after(self, reply: Any) -> dict[str, Any]:
        """The request that follows a reply with a call."""
        return {**self.body, self.history: self.body[self.history] + self.back(reply)}


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        "messages",
        {"messages": [{"role": "system", "content": "be good"}, USER], "tools": [TOOL]},
        read_chat,
        chat_back,
        ("tool_calls", "stop"),
        ("required", {"type": "function", "function": {"name": "move"}}),
    ),
    "responses": Api(
        "/v1/responses",
        "input",
        {"instructions": "be good", "input": [USER], "tools": [FUNCTION]},
        read_response,
        response_back,
        ("completed", "completed"),
        ("required", {"type": "function", "name": "move"}),
    ),
    "messages": Api(
        "/v1/messages",
        "messages",
        {"max_tokens": 9000, "system": [{"type": "text", "text": "be good"}], "messages": [USER], "tools": [OWN]},
        read_message,
        message_back,
        ("tool_use", "end_turn"),
        ({"type": "any"}, {"type": "tool", "name": "move"}),
    ),
}
each_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


@each_api
async def test_a_tools_result_continues_the_sampled_ids(api: Api, tmp_path: Path) -> None:
    sampler = says(f"<think>a</think>I move.{CALL}")
    async with gateway(sampler, tmp_path) as it:
        first = (await it.post(api.path, api.body)).json()
        assert api.read(first) == ("a", "I move.", [("move", {"to": "Up"})], api.finishes[0])
        second = (await it.post(api.path, api.after(first))).json()
        assert api.read(second) == (None, "done", [], api.finishes[1])
        turns = it.turns()
    assert [turn.fresh for turn in turns] == [True, False]
    first_prompt, second_prompt = (sampler.template.tokenizer.decode(turn.prompt) for turn in turns)
    assert "be good" in first_prompt and "move" in first_prompt and "ok, moved" in second_prompt


@each_api
async def test_a_call_that_is_demanded(api: Api, tmp_path: Path) -> None:
    async with gateway(says(CALL), tmp_path) as it:
        for choice in api.choices:
            reply = (await it.post(api.path, {**api.body, "tool_choice": choice})).json()
            assert api.read(reply)[2:] == ([("move", {"to": "Up"})], api.finishes[0])


@each_api
async def test_halves_of_surrogate_pairs_in_a_call_are_served_as_replaced(api: Api, tmp_path: Path) -> None:
    """A model may write "\\ud83d" as an escape; no client can send that back as text."""
    said = '<tool_call>\n{"name": "move", "arguments": {"to": "\\ud83d Up \\ud83d\\ude00"}}\n</tool_call>'
    expected = {"to": "\N{REPLACEMENT CHARACTER} Up \N{GRINNING FACE}"}
    async with gateway(says(said, max_reply_tokens=1000), tmp_path) as it:
        first, again = [(await it.post(api.path, api.body)).json() for _ in range(2)]
        assert first == again and api.read(first).calls == [("move", expected)]
        streamed = await it.post(api.path, {**api.body, "stream": True})
        assert json.dumps(json.dumps(expected, ensure_ascii=False), ensure_ascii=False) in streamed.text
        assert api.read((await it.post(api.path, api.after(first))).json()).text == "done"
        assert [turn.fresh for turn in it.turns()] == [True, False], "what was sent back is known"


@each_api
async def test_a_stream_that_fails_late_has_an_error_event(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_HEARTBEAT_SECONDS", 0.01)

    async def fail(request: Any) -> Any:
        await asyncio.sleep(0.1)
        raise EngineError("the engine died")

    sampler = says("x")
    engine_of(sampler).generate = fail  # type: ignore[method-assign]
    async with gateway(sampler, tmp_path) as it:
        streamed = await it.post(api.path, {**api.body, "stream": True})
    (event,) = data_of(streamed.text)
    assert streamed.status_code == 200 and event.get("error", event)["message"] == "the engine died"


async def test_a_conversation_is_one_sample_of_what_was_sampled(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: f"reply {text.count('user')}")
    messages: list[Any] = [{"role": "system", "content": "be good"}]
    async with gateway(sampler, tmp_path) as it:
        for question in "abc":
            messages.append({"role": "user", "content": question})
            completion = await it.llm.chat.completions.create(model="m", messages=messages)
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
        it.records.record("one").reward(1.5, "")
        it.records.end("one", {"success": True})
    prompt = engine_of(sampler).requests[-1].prompt
    assert completion.usage is not None and completion.usage.prompt_tokens == len(prompt)
    (episode,) = read_episodes(tmp_path / "episodes")
    assert (episode.total_reward, episode.success, episode.end) == (1.5, True, "terminal")
    (sample,) = samples_of(episode)
    assert sample.tokens[: len(prompt)] == prompt
    assert sampler.template.tokenizer.decode(sample.tokens) == (
        "<|im_start|>system\nbe good<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nreply 1<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nreply 2<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nreply 3<|im_end|>"
    )
    assert sum(sample.sampled) == episode.sampled_tokens == sum(len(turn.reply) for turn in episode.turns)


LONG = "word " * 100
SAYS_ALL = f"<think>{LONG}</think>{LONG}{CALL}"
"""A thought, a text of several pieces, and a call."""


async def test_streams_of_chat_completions_add_up_to_whole_ones(tmp_path: Path) -> None:
    sampler = says(SAYS_ALL, max_reply_tokens=1500)
    async with gateway(sampler, tmp_path) as it:
        given: Any = {"model": "m", **APIS["chat"].body}
        stream = await it.llm.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        whole = await it.llm.chat.completions.create(**given)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content == LONG.strip()
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == LONG.strip()
    assert [(call.name, call.arguments) for call in calls if call] == [("move", '{"to": "Up"}')]
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason and chunks[-1].usage == whole.usage
    assert len(chunks) > 100 and len(engine_of(sampler).requests) == 1, "the whole reply is a repetition of the stream"


async def test_streams_of_responses_add_up_to_whole_ones(tmp_path: Path) -> None:
    given: Any = {"model": "m", **APIS["responses"].body}
    texts: dict[str, str] = {}
    async with gateway(says(SAYS_ALL, max_reply_tokens=1500), tmp_path) as it:
        async with it.llm.responses.stream(**given) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await it.llm.responses.create(**given)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.type] = texts.get(event.type, "") + getattr(event, "delta", "")
    assert texts == {
        "response.reasoning_text.delta": LONG.strip(),
        "response.output_text.delta": LONG.strip(),
        "response.function_call_arguments.delta": '{"to": "Up"}',
    }
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == whole.output_text == LONG.strip() and final.usage == whole.usage


async def test_text_after_a_later_thought_of_a_streamed_response_is_in_its_done_event(tmp_path: Path) -> None:
    channels = ("commentary", "analysis", "final")
    said = "<|end|><|start|>assistant".join(f"<|channel|>{name}<|message|>{name}" for name in channels)
    given: Any = {"model": "m", "input": "go"}
    async with gateway(scripted(lambda request, prompt: said, "gpt-oss"), tmp_path) as it:
        events = [event async for event in await it.llm.responses.create(**given, stream=True)]
    deltas: dict[int, str] = {}
    for event in events:
        if event.type.endswith("_text.delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    done = {event.output_index: event.text for event in events if event.type.endswith("_text.done")}
    assert done == deltas and events[-1].type == "response.completed"
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == events[-1].response.output
    assert list(deltas.values()) == ["commentaryfinal", "analysis"]


async def test_streams_of_messages_add_up_to_whole_ones(tmp_path: Path) -> None:
    async with gateway(says(SAYS_ALL, max_reply_tokens=1500), tmp_path) as it:
        events = data_of((await it.post("/v1/messages", {**APIS["messages"].body, "stream": True})).text)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == LONG.strip()
    assert "".join(delta.get("text", "") for delta in deltas) == LONG.strip()
    assert [delta["partial_json"] for delta in deltas if "partial_json" in delta] == ['{"to": "Up"}']
    kinds = [event["type"] for event in events]
    assert kinds[-5:] == [
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert kinds[0] == "message_start" and events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_responses_that_were_cut_say_so(tmp_path: Path) -> None:
    given: Any = {"model": "m", "input": "go", "max_output_tokens": 4}
    async with gateway(says(LONG), tmp_path) as it:
        whole = await it.llm.responses.create(**given)
        assert whole.status == "incomplete" and whole.usage is not None and whole.usage.output_tokens == 4
        assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
        events = [event.type async for event in await it.llm.responses.create(**given, stream=True)]
        assert events[-1] == "response.incomplete"


async def test_anthropics_stop_sequences_and_counts_of_tokens(tmp_path: Path) -> None:
    body: dict[str, Any] = {"system": "be good", "messages": [USER]}
    async with gateway(says("one, two, three"), tmp_path) as it:

        async def post(path: str = "", **more: Any) -> httpx.Response:
            return await it.http.post(f"/v1/messages{path}", json={**body, **more}, headers={"x-api-key": "one"})

        counted = (await post("/count_tokens")).json()
        whole = (await post(stop_sequences=["four", "two"])).json()
        streamed = data_of((await post(stop_sequences=["four", "two"], stream=True)).text)
        other = (await post(stop_sequences=["4"])).json()
    assert counted == {"input_tokens": whole["usage"]["input_tokens"]}
    stopped = {"stop_reason": "stop_sequence", "stop_sequence": "two"}
    assert streamed[-2]["delta"] == stopped == {name: whole[name] for name in stopped}
    assert whole["content"][0]["text"] == "one, "
    assert (other["stop_reason"], other["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("choice", ["auto", "none", "required", APIS["chat"].choices[1]])
async def test_a_choice_of_tool_is_honoured(tmp_path: Path, choice: Any) -> None:
    sampler, api = says(CALL), APIS["chat"]
    body = {"messages": [USER], "tools": [TOOL, OTHER], "tool_choice": choice}
    async with gateway(sampler, tmp_path) as it:
        first = (await it.post(api.path, body)).json()
        if choice == "none":
            assert api.read(first) == (None, CALL, [], "stop")
        else:
            assert api.read(first) == (None, None, [("move", {"to": "Up"})], "tool_calls")
            await it.post(api.path, {**body, "messages": [USER, *api.back(first)]})
        episode = it.records.record("one").episode
    turn, request = episode.turns[0], engine_of(sampler).requests[0]
    assert turn.structure == request.structure and bool(turn.structure) is (choice not in ("auto", "none"))
    assert ("look" in turn.structure) is (choice == "required")  # a named tool alone may be called


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "move", "arguments": {"to": NaN}}',
        '{"name": "move", "arguments": "{\\"to\\": 1e999}"}',
        '{"name": "move", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2001,
    ],
)
async def test_text_that_no_client_could_read_as_a_call_is_no_call(tmp_path: Path, said: str) -> None:
    async with gateway(says(said, max_reply_tokens=20_000, max_episode_tokens=30_000), tmp_path) as it:
        reply = await it.post("/v1/messages", {**APIS["messages"].body, "max_tokens": 20_000})
    assert read_message(reply.json()) == (None, said, [], "end_turn")


# --- what is refused --------------------------------------------------------------------------------------------------

HALF = "\ud800"
CHAT, RESPONSES, MESSAGES = (api.path for api in APIS.values())


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, {"messages": [USER], "n": 2}, "`n` is not supported"),
        (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "sometimes"}, "use auto, none, required, or name"),
        (
            CHAT,
            {"messages": [USER], "tools": [TOOL], "tool_choice": {"function": {"name": "jump"}}},
            "wants jump, but `tools` has move",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes only text"),
        (CHAT, {"messages": [USER] * 10_001}, "has 10001 messages; send at most 10000"),
        (CHAT, {"messages": [], "stream": True}, "there is no message"),
        (RESPONSES, {"input": "go", "previous_response_id": "x"}, "send the whole history as `input`"),
        (MESSAGES, {"messages": [{"role": "bot", "content": ""}]}, "the role 'bot'"),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "nobody"}]}, "the role 'nobody'"),
        (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "not JSON"),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": HALF}]}, "not JSON"),
        (RESPONSES, '{"input": "go", "tools": [{"type": "function", "name": "f", "parameters": 1e999}]}', "not JSON"),
        ("/sessions/one/reward", {"value": 10**400}, "`value` must be a number"),
        ("/sessions/one/reward", {"value": 1e308}, "`value` must be a number"),
        ("/sessions/one/end", {"error": HALF}, "not JSON"),
        ("/sessions", {"group": 10**400}, "`group` must be at least 0, and at most"),
    ],
)
async def test_what_cannot_be_used_is_the_callers_mistake(tmp_path: Path, path: str, body: Any, told: str) -> None:
    async with gateway(says("x"), tmp_path) as it:
        await it.ask()
        headers = {"authorization": "Bearer one", "content-type": "application/json"}
        text = body if isinstance(body, str) else json.dumps(body)
        reply = await it.http.post(path, content=text, headers=headers)
        assert reply.status_code == 400 and told in reply.json()["error"]["message"]
        it.records.end("one", {})


@pytest.mark.parametrize("depth", [5_000, 990, 960])
async def test_arguments_that_are_nested_too_deeply_are_the_callers_mistake(tmp_path: Path, depth: int) -> None:
    function = {"name": "move", "arguments": "[" * depth + "]" * depth}
    asked = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    async with gateway(says("x", max_episode_tokens=20_000), tmp_path) as it:
        reply = await it.post(CHAT, {"messages": [USER, asked, {"role": "tool", "content": "x"}]})
    assert reply.status_code in ((400,) if depth > 1_000 else (200, 400)), "how deep is too deep, depends on the stack"


async def test_errors_have_the_shape_of_the_api_that_was_called(tmp_path: Path) -> None:
    async with gateway(says("x", max_episode_tokens=300), tmp_path, most_body_bytes=10_000) as it:
        with pytest.raises(openai.BadRequestError, match="context is 300 tokens") as caught:
            await it.ask("word " * 300)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIStatusError) as large:
            await it.ask("a" * 20_000)
        assert large.value.status_code == 413
        with pytest.raises(openai.NotFoundError, match="has no POST /v1/embeddings"):
            await it.llm.embeddings.create(model="m", input="a")
        with pytest.raises(openai.NotFoundError, match="has no GET /v1/responses"):
            await it.llm.responses.retrieve("any")
        bad = (await it.post(MESSAGES, {"messages": [{"role": "bot"}]})).json()
        assert (bad["type"], bad["error"]["type"]) == ("error", "invalid_request_error")
        assert (await it.http.post(CHAT, content="{}", headers={"x-api-key": "one"})).status_code == 415
        for path, name, value in (
            (CHAT, "content-encoding", "gzip"),
            (CHAT, "content-type", "application/json; charset=utf-16"),
            ("/mcp", "content-encoding", "br"),
        ):
            headers = {"x-api-key": "one", "content-type": "application/json", name: value}
            refused = await it.http.post(path, content="{}", headers=headers)
            assert (refused.status_code, value.rpartition("=")[2] in refused.text) == (415, True)
        assert (await it.http.get("/v1/models", headers={"host": "evil.example"})).status_code == 421


def _post(url: str, length: int, sent: int) -> bytes:
    """Return the response that a plain client gets that writes its whole body before it reads."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nx-api-key: one\r\n"
        connection.sendall(f"{head}content-length: {length}\r\n\r\n".encode())
        connection.sendall(b"a" * sent)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


async def test_a_body_that_is_too_large_is_read_to_its_end_or_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed with unread data is reset, and loses its response."""
    async with gateway(says("x"), tmp_path) as it:
        for sent in (50_000_000, 1_000):
            reply = await asyncio.to_thread(_post, it.url, 50_000_000, sent)
            assert reply.startswith(b"HTTP/1.1 413 ") and b'"code":"body_too_large"' in reply
            monkeypatch.setattr(http, "LINGER_SECONDS", 0.2)


def test_a_replys_body_does_not_wait_for_the_acknowledgement_of_its_head() -> None:
    with closing(listen("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_long_prompt_is_encoded_beside_the_event_loop(tmp_path: Path) -> None:
    sampler = says("x", max_episode_tokens=100_000)
    encode, go = sampler.template.encode, threading.Event()

    def slow(text: str) -> list[int]:
        assert go.wait(60), "/health is answered meanwhile"
        return encode(text)

    sampler.template.encode = slow  # type: ignore[method-assign]
    async with gateway(sampler, tmp_path) as it:
        body = {"messages": [{"role": "user", "content": "a" * 30_000}]}
        long = [asyncio.create_task(it.post(path, body)) for path in (CHAT, f"{MESSAGES}/count_tokens")]
        for _ in range(10):
            assert (await it.http.get("/health")).status_code == 200
        assert not any(each.done() for each in long)
        go.set()
        reply, counted = [(await each).json() for each in long]
    assert counted["input_tokens"] == reply["usage"]["prompt_tokens"]


async def test_what_can_never_fit_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    sampler, encoded = says("x"), [0]
    longest = max(map(len, sampler.template.tokenizer.get_vocab()))
    room = sampler.sampling.max_episode_tokens - sampler.sampling.least_room
    encode = sampler.template.encode
    sampler.template.encode = lambda text: encoded.append(len(text)) or encode(text)  # type: ignore
    async with gateway(sampler, tmp_path) as it:
        await it.ask("a")
        assert encoded.pop()
        for length, told in ((7_900_000, "at least "), ((room + 1) * longest, "at least "), (room * longest, "")):
            encoded[:] = [0]
            with pytest.raises(openai.BadRequestError, match=rf"has {told}\d+ tokens") as caught:
                await it.ask("a" * length)
            assert caught.value.code == "context_length_exceeded" and (max(encoded) >= length) == (not told)


# --- sessions ---------------------------------------------------------------------------------------------------------


async def test_keys_are_given_out_by_who_has_the_token(tmp_path: Path) -> None:
    async with gateway(says("x"), tmp_path, token="secret") as it:
        assert (await it.post("/sessions", {}, key="wrong")).status_code == 401

        async def control(path: str = "", **body: Any) -> Any:
            return (await it.post(f"/sessions{path}", body, key="secret")).json()

        begun = await control(name="a", group=3)
        assert begun == await control(name="a", group=3) and begun["group"] == 3
        for wrong in (
            "a",
            "a.",
            "b." + begun["api_key"].partition(".")[2],
            "secret",
            Keys("secret").key("never-begun"),
        ):
            with pytest.raises(openai.AuthenticationError, match="names no session"):
                await it.ask(key=wrong)
        await it.ask(key=begun["api_key"])
        shown = await it.http.get("/sessions/a", headers={"authorization": "Bearer secret"})
        assert shown.json()["replies"] == 1
        for _ in range(2):  # by its key a reward is given once, and an end is one
            assert (await control("/a/reward", value=2, key="k"))["return"] == 2
        for _ in range(2):
            assert await control("/a/end") == {"name": "a", "over": True, "return": 2}
        with pytest.raises(openai.APIStatusError) as gone:
            await it.ask("another", key=begun["api_key"])
        assert gone.value.status_code == 410


async def test_a_session_that_nobody_calls_is_ended_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = says("x")

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    sampling, go, generate = asyncio.Event(), asyncio.Event(), engine_of(sampler).generate

    async def wait(request: Any) -> Any:
        sampling.set()
        await go.wait()
        return await generate(request)

    async with gateway(sampler, tmp_path, sessions=2) as it:
        it.records.idle_seconds = 600.0
        for key in ("dead", "alive", "dead"):
            await it.ask(key=key)
        with pytest.raises(openai.RateLimitError, match="2 sessions run"):
            await it.ask(key="third")
        it.records.record("dead").called -= 601
        with monkeypatch.context() as full_disk:
            full_disk.setattr(records, "write_episodes", no_room)
            it.records.end_idle(time.monotonic())
        it.records.end_idle(time.monotonic())
        await it.ask(key="third")
        assert (await it.http.get("/sessions")).json() == {"live": 2, "most": 2, "over": 1, "abandoned": 1}
        with pytest.raises(openai.APIStatusError, match="is over"):
            await it.ask("again", key="dead")
        engine_of(sampler).generate = wait  # type: ignore[method-assign]
        busy = asyncio.create_task(it.ask("slow", key="alive"))
        await sampling.wait()
        it.records.record("alive").called -= 601
        it.records.end_idle(time.monotonic())
        go.set()
        assert await busy == "x"
    (episode,) = read_episodes(tmp_path / "episodes")
    assert (episode.end, episode.error) == ("failed", "nobody called the session for 10 minutes")
    async with gateway(sampler, tmp_path) as it:
        assert it.records.counts() == {"live": 2, "most": 100, "over": 1, "abandoned": 1}
        late = await it.post("/sessions/dead/end", {"success": True})
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_over"), "its success would be lost"


async def test_a_repeated_request_has_the_same_reply(tmp_path: Path) -> None:
    sampler, release = scripted(lambda request, text: f"reply {request.seed}"), asyncio.Event()
    engine = engine_of(sampler)
    sample = engine.generate

    async def slow(request: Any) -> Any:
        await release.wait()
        return await sample(request)

    engine.generate = slow  # type: ignore[method-assign]
    async with gateway(sampler, tmp_path) as it:
        with pytest.raises(openai.APITimeoutError):
            await it.ask(timeout=0.2)
        both = asyncio.gather(it.ask(), it.ask())
        await asyncio.sleep(0.1)
        release.set()
        replies = {*await both, await it.ask()}
        assert len(replies) == len(engine.requests) == len(it.turns()) == 1
        assert await it.ask(seed=7) not in replies, "another seed asks for another sample"


async def test_each_session_is_one_member_of_a_group(tmp_path: Path) -> None:
    async with gateway(says("x"), tmp_path) as it:
        for name in ("a", "b", "c", "b"):
            begun = await it.post("/sessions", {"name": name, "group": 5})
            assert begun.json()["member"] == "abc".index(name)
        other = await it.post("/sessions", {"name": "b", "group": 4})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "session_differs")
        taken = await it.post("/sessions", {"name": "d", "group": 5, "member": 1})
        assert taken.status_code == 409
        assert taken.json()["error"] == {
            "message": "member 1 of group 5 is the session b: give another, or none for the next free one",
            "type": "invalid_request_error",
            "param": None,
            "code": "member_taken",
        }
        for name in ("a", "b"):
            await it.ask(key=name)
            await it.post(f"/sessions/{name}/end")
        assert (await it.post("/sessions", {"name": "d", "group": 5, "member": 1})).status_code == 409
        for path, status, code in (("a", 410, "session_over"), ("z", 404, "no_session")):
            late = await it.post(f"/sessions/{path}/reward", {"value": 1, "key": "k"})
            assert (late.status_code, late.json()["error"]["code"]) == (status, code)
    async with gateway(says("x"), tmp_path) as it:
        for member in (1, 2):  # one episode is over, the other one continues
            assert (await it.post("/sessions", {"name": "d", "group": 5, "member": member})).status_code == 409
        assert (await it.post("/sessions", {"name": "d", "group": 5})).json()["member"] == 3
        await it.ask(key="alone")
        for name in ("c", "d", "alone"):
            await it.post(f"/sessions/{name}/end")
    episodes = [(each.group, each.member) for each in read_episodes(tmp_path / "episodes")]
    assert episodes == [(5, 0), (5, 1), (5, 2), (5, 3), (6, 0)]


# --- what outlives the gateway ----------------------------------------------------------------------------------------


async def test_what_was_heard_of_outlives_the_gateway(tmp_path: Path) -> None:
    body: dict[str, Any] = {"messages": [USER]}
    samplers = [scripted(lambda request, text: f"<think>a</think>{CALL} {request.seed}", "qwen3") for _ in range(2)]
    async with gateway(samplers[0], tmp_path) as it:
        first = (await it.post(CHAT, body)).json()
        await it.ask(key="ended")
        it.records.record("one").reward(0.5, "k")
        it.records.end("ended", {"end": "failed", "error": "the grader broke"})
    journal = tmp_path / "sessions" / "one.jsonl"
    journal.write_text(journal.read_text() + '{"kind": "rew')  # a line that the kill cut
    async with gateway(samplers[1], tmp_path) as it:
        assert (await it.post(CHAT, body)).json() == first and not engine_of(samplers[1]).requests
        it.records.record("one").reward(0.5, "k")
        await it.post(CHAT, {"messages": [USER, first["choices"][0]["message"], {"role": "user", "content": "on"}]})
        assert [turn.reward for turn in it.turns()] == [0.5, 0.0]
        with pytest.raises(openai.APIStatusError) as gone:
            await it.ask("other", key="ended")
        assert gone.value.status_code == 410
        it.records.record("one").log("end", end="terminal", success=None, error="")  # and a kill before it is written
    for _ in range(2):
        async with gateway(samplers[1], tmp_path):
            pass
    episodes = [(each.end, each.error, len(each.turns)) for each in read_episodes(tmp_path / "episodes")]
    assert episodes == [("terminal", "", 2), ("failed", "the grader broke", 1)]


async def test_a_journal_that_cannot_be_read_fails_its_session_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler, journals = says("x"), tmp_path / "sessions"
    async with gateway(sampler, tmp_path) as it:
        for name in ("cut", "headless", "sound"):
            await it.ask(key=name)
        it.records.record("cut").reward(2.0, "")
    for name, damaged in (("cut", 2), ("headless", 0)):
        lines = (journals / f"{name}.jsonl").read_text().splitlines(keepends=True)
        lines[damaged] = lines[damaged][:9] + lines[damaged]  # as a line that another was written behind
        (journals / f"{name}.jsonl").write_text("".join(lines))
    for _ in range(2):
        async with gateway(sampler, tmp_path) as it:
            assert await it.ask("again", key="sound") == "x"
            for name in ("cut", "headless"):
                with pytest.raises(openai.APIStatusError, match="is over") as gone:
                    await it.ask("again", key=name)
                assert gone.value.status_code == 410
            assert it.records.counts()["live"] == 1 and it.records.counts()["over"] == 2
    (failed,) = read_episodes(tmp_path / "episodes")
    assert (failed.end, failed.error) == ("failed", "line 3 of the session's journal cannot be read")
    assert len(failed.turns) == 1
    assert sorted(each.name for each in journals.glob("*.unreadable")) == ["cut.unreadable", "headless.unreadable"]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 2 and f"{journals / 'cut.jsonl'}, line 3" in warnings[0]


async def test_other_damaged_files_stop_no_other_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler, episodes = says("x"), tmp_path / "episodes"
    async with gateway(sampler, tmp_path) as it:
        for name in ("first", "second"):
            await it.post("/sessions", {"name": name, "group": 0})
        await it.ask(key="first")
        it.records.end("first", {})
    damaged = tmp_path / "sessions" / "first.over", episodes / "group-00000000.jsonl"
    for file in damaged:
        file.write_bytes(b"\0" * 20)  # as after a crash of the machine
    async with gateway(sampler, tmp_path) as it:
        await it.ask(key="second")
        it.records.end("second", {"success": True})
        assert it.records.counts()["over"] == 2
    assert [episode.success for episode in read_episodes(episodes)] == [True]
    assert (episodes / "group-00000000.unreadable").read_bytes() == b"\0" * 20
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 2 and all(str(file) in said for file, said in zip(damaged, warnings, strict=True))


async def test_no_session_gets_the_group_of_an_episode_whose_session_file_is_damaged(tmp_path: Path) -> None:
    for name in ("first", "other"):
        async with gateway(says("x"), tmp_path) as it:
            await it.ask(key=name)
            it.records.end(name, {})
        (tmp_path / "sessions" / f"{name}.over").write_bytes(b"")
    assert len(list((tmp_path / "episodes").iterdir())) == 2


async def test_an_abandoned_session_is_counted_once_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = says("x")
    async with gateway(sampler, tmp_path) as it:
        it.records.idle_seconds = 600.0
        await it.ask(key="dead")
        with monkeypatch.context() as killed:
            killed.setattr(Path, "unlink", lambda *_, **__: None)  # the kill comes before the journal is removed
            it.records.end_idle(time.monotonic() + 601)
    for _ in range(2):
        async with gateway(sampler, tmp_path) as it:
            assert it.records.counts() == {"live": 0, "most": 100, "over": 1, "abandoned": 1}


async def test_what_a_full_disk_did_not_take_has_not_been(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: f"reply {len(engine_of(sampler).requests)}")
    journal = tmp_path / "sessions" / "one.jsonl"
    messages: list[Any] = [USER]
    async with gateway(sampler, tmp_path) as it:
        with small_files(20):
            assert (await it.post("/sessions", {"name": "one", "group": 0})).status_code == 507
        assert (await it.post("/sessions", {"name": "one", "group": 0})).json()["member"] == 0
        for _ in range(2):
            before = journal.read_bytes()
            with small_files(len(before) + 20):
                assert (await it.post(CHAT, {"messages": messages})).status_code == 507
                assert journal.read_bytes() == before
            reply = (await it.post(CHAT, {"messages": messages})).json()
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "on"}]
        assert [turn.fresh for turn in it.turns()] == [True, False] and read_chat(reply).text == "reply 4"
    async with gateway(sampler, tmp_path) as it:
        assert (await it.post(CHAT, {"messages": messages[:-2]})).json() == reply
        it.records.end("one", {})
    (episode,) = read_episodes(tmp_path / "episodes")
    (sample,) = samples_of(episode)
    assert sample.tokens == [*engine_of(sampler).requests[-1].prompt, *episode.turns[-1].reply]
