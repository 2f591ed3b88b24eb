"""The gateway over real sockets, with OpenAI's own client and plain HTTP."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from starpod.gateway import app
from starpod.gateway.app import Keys, create_app
from starpod.gateway.control import endpoints
from starpod.gateway.listening import listening
from starpod.gateway.records import Records
from starpod.gateway.session import Sampler
from starpod.report.site import listen
from starpod.trainer.data.batch import samples_of
from starpod.trainer.data.files import read_episodes, read_groups
from starpod.trainer.engines.base import EngineError
from tests.support import small_files
from tests.tools.gateway.sampling import engine_of, scripted

CALL = '<tool_call>\n{"name": "move", "arguments": {"to": "Up"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "move", "description": "Moves.", "parameters": {"type": "object", "properties": {}}},
}


@asynccontextmanager
async def gateway(sampler: Sampler, folder: Path, token: str = "", **limits: Any) -> AsyncIterator[tuple[str, Records]]:
    records = Records(sampler, folder, most=limits.pop("sessions", 100), begins_unknown=not token)
    records.restore()
    keys = Keys(token)
    application = create_app(records, model="test", keys=keys, more=endpoints(records, keys), **limits)
    async with listening(application) as url:
        yield url, records


def client(url: str, key: str = "one", **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **{"max_retries": 0, **more})


async def test_a_conversation_is_one_sample_of_what_was_sampled(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: f"reply {text.count('user')}")
    async with gateway(sampler, tmp_path) as (url, records):
        llm = client(url)
        messages: list[Any] = [{"role": "system", "content": "be good"}]
        for question in ("a", "b", "c"):
            messages.append({"role": "user", "content": question})
            completion = await llm.chat.completions.create(model="m", messages=messages)
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
        assert completion.choices[0].message.content == "reply 3"
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == len(engine_of(sampler).requests[-1].prompt)
        records.record("one").reward(1.5, "")
        records.end("one", {"success": True})
    (group,) = read_groups(tmp_path / "episodes")
    (episode,) = group.episodes
    assert (episode.total_reward, episode.success, episode.end) == (1.5, True, "terminal")
    (sample,) = samples_of(episode)
    engine = engine_of(sampler)
    assert sample.tokens[: len(engine.requests[-1].prompt)] == engine.requests[-1].prompt
    text = sampler.template.tokenizer.decode(sample.tokens)
    assert text == (
        "<|im_start|>system\nbe good<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nreply 1<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nreply 2<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nreply 3<|im_end|>"
    )
    assert sum(sample.sampled) == episode.sampled_tokens == sum(len(turn.reply) for turn in episode.turns)


async def test_streams_say_the_same_as_whole_replies(tmp_path: Path) -> None:
    long = "word " * 200
    sampler = scripted(lambda request, text: f"<think>hm</think>{long}{CALL}", max_reply_tokens=1500)
    async with gateway(sampler, tmp_path) as (url, _):
        llm = client(url)
        given: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": [TOOL]}
        whole = (await llm.chat.completions.create(**given)).choices[0].message
        text, name, arguments, thought, finish, usage = "", "", "", "", None, None
        stream = await llm.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
    assert whole.tool_calls is not None and whole.tool_calls[0].type == "function"
    assert (text, thought, finish) == (whole.content, "hm", "tool_calls") and text == long.strip()
    assert (name, json.loads(arguments)) == ("move", {"to": "Up"}) and usage is not None
    assert len(engine_of(sampler).requests) == 1, "a stream of the same request is a repetition"


async def test_tool_calls_and_results_go_on_from_what_was_sampled(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: CALL if "tool_response" not in text and "tool\n" not in text else "done")
    async with gateway(sampler, tmp_path) as (url, records):
        llm = client(url)
        messages: list[Any] = [{"role": "user", "content": "go"}]
        first = (await llm.chat.completions.create(model="m", messages=messages, tools=[TOOL])).choices[0]  # type: ignore[list-item]
        assert first.finish_reason == "tool_calls" and first.message.content is None
        assert first.message.tool_calls
        call = first.message.tool_calls[0]
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "ok, moved"}]
        second = (await llm.chat.completions.create(model="m", messages=messages, tools=[TOOL])).choices[0]  # type: ignore[list-item]
        assert second.message.content == "done"
        turns = records.record("one").episode.turns
    assert [turn.fresh for turn in turns] == [True, False]
    assert "ok, moved" in sampler.template.tokenizer.decode(turns[1].prompt)
    assert "move" in sampler.template.tokenizer.decode(turns[0].prompt), "the tools are described"


async def test_responses_with_the_same_history_as_items(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: f"<think>a</think>{CALL}" if "ok, moved" not in text else "done")
    tool: Any = {"type": "function", "name": "move", "parameters": {"type": "object"}, "strict": False}
    async with gateway(sampler, tmp_path) as (url, records):
        llm = client(url)
        history: list[Any] = [{"role": "user", "content": "go"}]
        first = await llm.responses.create(model="m", instructions="be good", input=history, tools=[tool])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        call = first.output[1]
        assert call.type == "function_call"
        history += [item.model_dump() for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok, moved"})
        given: Any = {"model": "m", "instructions": "be good", "input": history, "tools": [tool]}
        assert (await llm.responses.create(**given)).output_text == "done"
        kinds = [event.type async for event in await llm.responses.create(**given, stream=True)]
        turns = records.record("one").episode.turns
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert [turn.fresh for turn in turns] == [True, False]


async def test_streams_of_responses_add_up_to_whole_ones(tmp_path: Path) -> None:
    said = "word " * 100
    sampler = scripted(lambda request, text: f"<think>{said}</think>{said}{CALL}", max_reply_tokens=1500)
    tool: Any = {"type": "function", "name": "move", "parameters": {"type": "object"}, "strict": False}
    given: Any = {"model": "m", "input": "go", "tools": [tool]}
    async with gateway(sampler, tmp_path) as (url, _):
        llm = client(url)
        whole = await llm.responses.create(**given)
        texts: dict[str, str] = {}
        numbers = []
        async with llm.responses.stream(**given) as stream:
            async for event in stream:
                numbers.append(event.sequence_number)
                if event.type.endswith(".delta"):
                    texts[event.type] = texts.get(event.type, "") + getattr(event, "delta", "")
            final = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert texts == {
        "response.reasoning_text.delta": said.strip(),
        "response.output_text.delta": said.strip(),
        "response.function_call_arguments.delta": '{"to": "Up"}',
    }
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == whole.output_text == said.strip() and final.usage == whole.usage
    assert len(engine_of(sampler).requests) == 1, "a stream of the same request is a repetition"


async def test_responses_that_were_cut_say_so(tmp_path: Path) -> None:
    async with gateway(scripted(lambda request, text: "word " * 50, max_reply_tokens=8), tmp_path) as (url, _):
        llm = client(url)
        whole = await llm.responses.create(model="m", input="go", max_output_tokens=4)
        assert whole.status == "incomplete" and whole.usage is not None and whole.usage.output_tokens == 4
        assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
        stream = await llm.responses.create(model="m", input="go", max_output_tokens=4, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_responses_are_not_stored(tmp_path: Path) -> None:
    async with gateway(scripted(lambda request, text: "x"), tmp_path) as (url, _):
        llm = client(url)
        first = await llm.responses.create(model="m", input="go")
        with pytest.raises(openai.BadRequestError, match="send the whole history as `input`") as caught:
            await llm.responses.create(model="m", input="on", previous_response_id=first.id)
        assert caught.value.code == "unsupported_parameter"
        with pytest.raises(openai.NotFoundError, match="has no GET /v1/responses"):
            await llm.responses.retrieve(first.id)


async def test_a_stream_of_responses_that_fails_late_has_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_HEARTBEAT_SECONDS", 0.05)
    sampler = scripted(lambda request, text: "x")

    async def fail(request: Any) -> Any:
        await asyncio.sleep(0.2)
        raise EngineError("the engine died")

    engine_of(sampler).generate = fail  # type: ignore[method-assign]
    async with gateway(sampler, tmp_path) as (url, _):
        (event,) = [each async for each in await client(url).responses.create(model="m", input="go", stream=True)]
    assert event.type == "error" and (event.code, event.message) == ("engine_failed", "the engine died")


async def test_messages_of_anthropic_over_plain_http(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: f"<think>a</think>I move.{CALL}" if "ok, moved" not in text else "done")
    tool = {"name": "move", "description": "Moves.", "input_schema": {"type": "object"}}
    async with gateway(sampler, tmp_path) as (url, records), httpx.AsyncClient(base_url=url) as http:
        headers = {"x-api-key": "one", "anthropic-version": "2023-06-01"}
        body: dict[str, Any] = {
            "model": "m",
            "max_tokens": 1000,
            "system": [{"type": "text", "text": "be good"}],
            "messages": [{"role": "user", "content": "go"}],
            "tools": [tool],
        }
        first = (await http.post("/v1/messages", json=body, headers=headers)).json()
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert first["stop_reason"] == "tool_use" and first["content"][2]["input"] == {"to": "Up"}
        result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "ok, moved"}
        body["messages"] += [
            {"role": "assistant", "content": first["content"][1:]},  # a client may leave thoughts out
            {"role": "user", "content": [result]},
        ]
        second = (await http.post("/v1/messages", json=body, headers=headers)).json()
        assert second["content"] == [{"type": "text", "text": "done", "citations": None}]
        streamed = await http.post("/v1/messages", json={**body, "stream": True}, headers=headers)
        turns = records.record("one").episode.turns
    names = [line.removeprefix("event: ") for line in streamed.text.splitlines() if line.startswith("event: ")]
    assert names == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [turn.fresh for turn in turns] == [True, False]


async def test_anthropics_stop_sequences_and_counts_of_tokens(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "one, two, three")
    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        headers = {"x-api-key": "one"}
        body: dict[str, Any] = {"model": "m", "system": "be good", "messages": [{"role": "user", "content": "go"}]}
        counted = (await http.post("/v1/messages/count_tokens", json=body, headers=headers)).json()
        body |= {"max_tokens": 100, "stop_sequences": ["four", "two"]}
        whole = (await http.post("/v1/messages", json=body, headers=headers)).json()
        streamed = await http.post("/v1/messages", json={**body, "stream": True}, headers=headers)
        other = (await http.post("/v1/messages", json={**body, "stop_sequences": ["4"]}, headers=headers)).json()
        unknown = await http.post("/v1/messages/count_tokens", json={"messages": [{"role": "nobody"}]}, headers=headers)
    assert counted == {"input_tokens": whole["usage"]["input_tokens"]}
    assert (whole["stop_reason"], whole["stop_sequence"], whole["content"][0]["text"]) == (
        "stop_sequence",
        "two",
        "one, ",
    )
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data")]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "two"}
    assert (other["stop_reason"], other["stop_sequence"]) == ("end_turn", None)
    assert unknown.status_code == 400 and unknown.json()["type"] == "error"


OTHER = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "tools", "begun", "finish"),
    [
        ("auto", [TOOL], "", "tool_calls"),
        ("none", [TOOL], "", "stop"),
        ("required", [TOOL], '<tool_call>\n{"name": "move", "arguments":', "tool_calls"),
        ("required", [TOOL, OTHER], '<tool_call>\n{"name": "', "tool_calls"),
        (
            {"type": "function", "function": {"name": "move"}},
            [TOOL, OTHER],
            '<tool_call>\n{"name": "move", "arguments":',
            "tool_calls",
        ),
    ],
)
async def test_a_choice_of_tool_is_honoured(tmp_path: Path, choice: Any, tools: Any, begun: str, finish: str) -> None:
    """A call that must be is begun in the prompt: the beginning is not sampled, and not trained on."""
    sampler = scripted(lambda request, text: CALL.removeprefix(begun))
    async with gateway(sampler, tmp_path) as (url, records):
        messages: list[Any] = [{"role": "user", "content": "go"}]
        given: Any = {"model": "m", "messages": messages, "tools": tools, "tool_choice": choice}
        first = (await client(url).chat.completions.create(**given)).choices[0]
        assert first.finish_reason == finish
        if finish == "stop":
            assert first.message.content == CALL
        else:
            (call,) = first.message.tool_calls or ()
            assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == (
                "move",
                {"to": "Up"},
            )
            messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "moved"}]
            await client(url).chat.completions.create(**given)
        episode = records.record("one").episode
    decode = sampler.template.tokenizer.decode
    assert decode(episode.turns[0].prompt).endswith(f"<|im_start|>assistant\n{begun}")
    assert sampler.template.decode(episode.turns[0].reply) == CALL.removeprefix(begun)
    assert episode.turns[0].text == CALL
    (sample,) = samples_of(episode)
    assert decode(sample.tokens).count(CALL) == len(episode.turns)
    assert sum(sample.sampled) == sum(len(turn.reply) for turn in episode.turns)


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ("sometimes", "use auto, none, required, or name a function"),
        ({"type": "function", "function": {"name": "jump"}}, "wants jump, and `tools` has move"),
    ],
)
async def test_a_choice_that_cannot_be_met_is_refused(tmp_path: Path, choice: Any, problem: str) -> None:
    async with gateway(scripted(lambda request, text: "x"), tmp_path) as (url, _):
        given: Any = {"messages": [{"role": "user", "content": "go"}], "tools": [TOOL], "tool_choice": choice}
        with pytest.raises(openai.BadRequestError, match=problem):
            await client(url).chat.completions.create(model="m", **given)


async def test_a_choice_of_tool_in_the_other_apis(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: '{"to": "Up"}}\n</tool_call>')
    tool = {"name": "move", "input_schema": {"type": "object"}}
    response_tool: Any = {"type": "function", "name": "move", "parameters": {"type": "object"}, "strict": False}
    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "go"}], "tools": [tool]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "move"}):
            reply = await http.post("/v1/messages", json={**body, "tool_choice": choice}, headers={"x-api-key": "a"})
            assert reply.json()["stop_reason"] == "tool_use"
        for named in ("required", {"type": "function", "name": "move"}):
            given: Any = {"input": "go", "tools": [response_tool], "tool_choice": named}
            response = await client(url).responses.create(model="m", **given)
            assert [item.type for item in response.output] == ["function_call"] and response.tool_choice is not None


async def test_errors_have_the_shape_of_the_api_that_was_called(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x", max_episode_tokens=300)
    async with gateway(sampler, tmp_path, most_body_bytes=10_000) as (url, _), httpx.AsyncClient(base_url=url) as http:
        llm = client(url)
        with pytest.raises(openai.BadRequestError, match="context is 300 tokens") as caught:
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 300}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="`n` is not supported"):
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], n=2)
        with pytest.raises(openai.APIStatusError) as large:
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "a" * 20_000}])
        assert large.value.status_code == 413
        picture: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        with pytest.raises(openai.BadRequestError, match="takes text alone"):
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": picture}])
        with pytest.raises(openai.NotFoundError, match="has no POST /v1/embeddings"):
            await llm.embeddings.create(model="m", input="a")
        bad = await http.post("/v1/messages", json={"messages": [{"role": "bot", "content": ""}]})
        assert bad.status_code == 400
        assert bad.json()["error"]["type"] == "invalid_request_error" and bad.json()["type"] == "error"
        assert (await http.post("/v1/chat/completions", content="{}")).status_code == 415
        assert (await http.get("/v1/models", headers={"host": "evil.example"})).status_code == 421
        streamed = await http.post(
            "/v1/chat/completions", json={"stream": True, "messages": []}, headers=_bearer("one")
        )
        assert streamed.status_code == 400, "an error before the first byte of a stream has its status"


async def test_keys_are_given_out_by_who_has_the_token(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x")
    async with gateway(sampler, tmp_path, token="secret") as (url, _), httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/sessions", json={}, headers=_bearer("wrong"))).status_code == 401
        begun = (await http.post("/sessions", json={"name": "a", "group": 3}, headers=_bearer("secret"))).json()
        again = (await http.post("/sessions", json={"name": "a", "group": 3}, headers=_bearer("secret"))).json()
        assert begun == again and begun["group"] == 3
        for wrong in ("a", "a.", "b." + begun["api_key"].partition(".")[2], "secret"):
            with pytest.raises(openai.AuthenticationError):
                await _ask(client(url, wrong))
        with pytest.raises(openai.AuthenticationError, match="names no session"):
            await _ask(client(url, Keys("secret").key("never-begun")))
        await _ask(client(url, begun["api_key"]))
        shown = (await http.get("/sessions/a", headers=_bearer("secret"))).json()
        assert shown["replies"] == 1
        for _ in range(2):  # by its key a reward is given once, and an end is one
            paid = await http.post("/sessions/a/reward", json={"value": 2, "key": "k"}, headers=_bearer("secret"))
            assert paid.json()["return"] == 2
        for _ in range(2):
            over = await http.post("/sessions/a/end", json={}, headers=_bearer("secret"))
            assert over.json() == {"name": "a", "over": True, "return": 2}
        with pytest.raises(openai.APIStatusError) as gone:
            await _ask(client(url, begun["api_key"]), "another")
        assert gone.value.status_code == 410


async def test_sessions_are_bounded(tmp_path: Path) -> None:
    async with gateway(scripted(lambda request, text: "x"), tmp_path, sessions=2) as (url, _):
        for key in ("a", "b", "a"):
            await _ask(client(url, key))
        with pytest.raises(openai.RateLimitError, match="2 sessions run"):
            await _ask(client(url, "c"))


async def test_a_session_that_nobody_calls_is_ended_as_failed(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x")
    async with gateway(sampler, tmp_path, sessions=2) as (url, records), httpx.AsyncClient() as http:
        records.idle_seconds = 600.0
        await _ask(client(url, "dead"))
        await _ask(client(url, "alive"))
        with pytest.raises(openai.RateLimitError, match="2 sessions run"):
            await _ask(client(url, "third"))
        records.record("dead").called -= 601
        records.end_idle(time.monotonic())
        await _ask(client(url, "third"))
        counts = (await http.get(f"{url}/sessions")).json()
        assert counts == {"live": 2, "most": 2, "over": 1, "abandoned": 1}
        with pytest.raises(openai.APIStatusError, match="is over"):
            await _ask(client(url, "dead"), "again")
        sampling, go, generate = asyncio.Event(), asyncio.Event(), engine_of(sampler).generate

        async def wait(request: Any) -> Any:
            sampling.set()
            await go.wait()
            return await generate(request)

        engine_of(sampler).generate = wait  # type: ignore[method-assign]
        busy = asyncio.create_task(_ask(client(url, "alive"), "slow"))
        await sampling.wait()
        records.record("alive").called -= 601
        records.end_idle(time.monotonic())
        go.set()
        assert await busy == "x"
    (group,) = read_groups(tmp_path / "episodes")
    (episode,) = group.failed
    assert episode.error == "nobody called the session for 10 minutes"
    async with gateway(sampler, tmp_path) as (_, records):
        assert records.counts() == {"live": 2, "most": 100, "over": 1, "abandoned": 1}


async def test_a_repeated_request_has_the_same_reply(tmp_path: Path) -> None:
    release = asyncio.Event()
    sampler = scripted(lambda request, text: f"reply {request.seed}")
    engine = engine_of(sampler)
    sample = engine.generate

    async def slow(request: Any) -> Any:
        await release.wait()
        return await sample(request)

    engine.generate = slow  # type: ignore[method-assign]
    async with gateway(sampler, tmp_path) as (url, records):
        with pytest.raises(openai.APITimeoutError):
            await _ask(client(url, timeout=0.2))
        both = asyncio.gather(_ask(client(url)), _ask(client(url)))
        await asyncio.sleep(0.1)
        release.set()
        replies = {*await both, await _ask(client(url))}
        assert len(replies) == 1 and len(engine.requests) == 1
        assert len(records.record("one").episode.turns) == 1
        other = await client(url).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], seed=7
        )
        assert other.choices[0].message.content not in replies, "another seed asks for another sample"


def test_a_replys_body_does_not_wait_for_the_acknowledgement_of_its_head() -> None:
    with closing(listen("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_what_was_heard_of_outlives_the_gateway(tmp_path: Path) -> None:
    def sampler() -> Sampler:
        return scripted(lambda request, text: f"<think>a</think>{CALL} {request.seed}", "qwen3")

    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with gateway(sampler(), tmp_path) as (url, records):
        first = (await client(url).chat.completions.create(model="m", messages=messages)).choices[0].message
        await _ask(client(url, "ended"))
        records.record("one").reward(0.5, "k")
        records.end("ended", {"end": "failed", "error": "the grader broke"})
    journal = tmp_path / "sessions" / "one.jsonl"
    journal.write_text(journal.read_text() + '{"kind": "rew')  # a line that the kill cut
    async with gateway(again := sampler(), tmp_path) as (url, records):
        repeated = (await client(url).chat.completions.create(model="m", messages=messages)).choices[0].message
        assert repeated == first and not engine_of(again).requests
        records.record("one").reward(0.5, "k")
        messages += [first, {"role": "user", "content": "on"}]
        await client(url).chat.completions.create(model="m", messages=messages)
        turns = records.record("one").episode.turns
        assert [turn.reward for turn in turns] == [0.5, 0.0]
        with pytest.raises(openai.APIStatusError) as gone:
            await _ask(client(url, "ended"), "other")
        assert gone.value.status_code == 410
        records.end("one", {})
    episodes = [each for group in read_groups(tmp_path / "episodes") for each in group.members]
    assert [(each.end, each.error, len(each.turns)) for each in episodes] == [
        ("terminal", "", 2),
        ("failed", "the grader broke", 1),
    ]


async def test_an_end_that_a_kill_cut_is_finished(tmp_path: Path) -> None:
    async with gateway(scripted(lambda request, text: "x"), tmp_path) as (url, records):
        await _ask(client(url))
        records.record("one").log("end", end="terminal", success=None, error="")
    for _ in range(2):
        async with gateway(scripted(lambda request, text: "x"), tmp_path):
            pass
    (group,) = read_groups(tmp_path / "episodes")
    assert len(group.episodes) == 1


async def test_each_session_is_one_member_of_a_group(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x")
    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        for name in ("a", "b", "c", "b"):
            begun = (await http.post("/sessions", json={"name": name, "group": 5})).json()
            assert begun["member"] == "abc".index(name)
        taken = await http.post("/sessions", json={"name": "d", "group": 5, "member": 1})
        assert taken.status_code == 409
        assert taken.json()["error"] == {
            "message": "member 1 of group 5 is the session b: give another, or none for the next free one",
            "type": "invalid_request_error",
            "param": None,
            "code": "member_taken",
        }
        for name in ("a", "b"):
            await _ask(client(url, name))
            await http.post(f"/sessions/{name}/end", json={})
        assert (await http.post("/sessions", json={"name": "d", "group": 5, "member": 1})).status_code == 409
    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        for member in (1, 2):  # of one that is over, and of one that goes on
            again = await http.post("/sessions", json={"name": "d", "group": 5, "member": member})
            assert again.status_code == 409
        assert (await http.post("/sessions", json={"name": "d", "group": 5})).json()["member"] == 3
        await _ask(client(url, "alone"))
        for name in ("c", "d", "alone"):
            await http.post(f"/sessions/{name}/end", json={})
    episodes = [(each.group, each.member) for each in read_episodes(tmp_path / "episodes")]
    assert episodes == [(5, 0), (5, 1), (5, 2), (5, 3), (6, 0)]


async def test_a_reward_after_the_end_is_refused_like_all_else(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x")
    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        await _ask(client(url))
        await http.post("/sessions/one/end", json={})
        late = await http.post("/sessions/one/reward", json={"value": 1, "key": "k"})
        never = await http.post("/sessions/two/reward", json={"value": 1, "key": "k"})
    assert (late.status_code, late.json()["error"]["code"]) == (410, "session_over")
    assert (never.status_code, never.json()["error"]["code"]) == (404, "no_session")


async def test_halves_of_surrogate_pairs_in_a_call_are_served_as_replaced(tmp_path: Path) -> None:
    """A model may write "\\ud83d" as an escape; no client can send that back as text."""
    said = '<tool_call>\n{"name": "move", "arguments": {"to": "\\ud83d Up \\ud83d\\ude00"}}\n</tool_call>'
    sampler = scripted(lambda request, text: said if "moved" not in text else "done", max_reply_tokens=1000)
    expected = {"to": "\N{REPLACEMENT CHARACTER} Up \N{GRINNING FACE}"}
    async with gateway(sampler, tmp_path) as (url, records), httpx.AsyncClient(base_url=url) as http:
        llm = client(url)
        given: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": [TOOL]}
        first, again = [(await llm.chat.completions.create(**given)).choices[0].message for _ in range(2)]
        assert first == again and first.tool_calls and first.tool_calls[0].type == "function"
        arguments = first.tool_calls[0].function.arguments
        assert json.loads(arguments) == expected
        chunks = [each async for each in await llm.chat.completions.create(**given, stream=True)]
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function and call.function.arguments for call in calls] == [arguments]
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "moved"}
        given["messages"] += [first, result]
        assert (await llm.chat.completions.create(**given)).choices[0].message.content == "done"

        tool: Any = {"type": "function", "name": "move", "parameters": {"type": "object"}, "strict": False}
        (item,) = (await llm.responses.create(model="m", input="go", tools=[tool])).output
        assert item.type == "function_call" and item.arguments == arguments

        body: dict[str, Any] = {"max_tokens": 1000, "messages": [{"role": "user", "content": "go"}]}
        body["tools"] = [{"name": "move", "input_schema": {"type": "object"}}]
        whole = (await http.post("/v1/messages", json=body, headers={"x-api-key": "two"})).json()
        assert whole["content"][0]["input"] == expected
        streamed = await http.post("/v1/messages", json={**body, "stream": True}, headers={"x-api-key": "two"})
        assert json.dumps(json.dumps(expected, ensure_ascii=False), ensure_ascii=False) in streamed.text
        moved = {"type": "tool_result", "tool_use_id": whole["content"][0]["id"], "content": "moved"}
        body["messages"] += [
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": [moved]},
        ]
        await http.post("/v1/messages", json=body, headers={"x-api-key": "two"})
        for name in ("one", "two"):
            turns = records.record(name).episode.turns
            assert [turn.fresh for turn in turns if "moved" in turn.observation] == [False], (
                "what was sent back is known"
            )


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "move", "arguments": {"to": NaN}}',
        '{"name": "move", "arguments": "{\\"to\\": 1e999}"}',
        '{"name": "move", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2001,
    ],
)
async def test_what_no_client_could_read_as_a_call_is_none(tmp_path: Path, said: str) -> None:
    sampler = scripted(lambda request, text: said, max_reply_tokens=20_000, max_episode_tokens=30_000)
    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        body = {"max_tokens": 20_000, "messages": [{"role": "user", "content": "go"}], "tools": [{"name": "move"}]}
        reply = await http.post("/v1/messages", json=body, headers={"x-api-key": "one"})
    assert reply.status_code == 200
    assert reply.json()["content"] == [{"type": "text", "text": said, "citations": None}]


async def test_a_long_prompt_is_encoded_beside_the_event_loop(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x", max_episode_tokens=100_000)
    encode, go = sampler.template.encode, threading.Event()

    def slow(text: str) -> list[int]:
        assert go.wait(5), "/health is answered meanwhile"
        return encode(text)

    async with gateway(sampler, tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        sampler.template.encode = slow  # type: ignore[method-assign]
        body = {"messages": [{"role": "user", "content": "a" * 30_000}]}
        long = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=_bearer("one"))),
            asyncio.create_task(http.post("/v1/messages/count_tokens", json=body, headers=_bearer("one"))),
        ]
        for _ in range(10):
            assert (await http.get("/health")).status_code == 200
        assert not any(each.done() for each in long)
        go.set()
        replies = [await each for each in long]
    assert [each.status_code for each in replies] == [200, 200]
    assert replies[1].json()["input_tokens"] == replies[0].json()["usage"]["prompt_tokens"]


async def test_messages_are_bounded(tmp_path: Path) -> None:
    async with gateway(scripted(lambda request, text: "x"), tmp_path) as (url, _):
        with pytest.raises(openai.BadRequestError, match="has 10001 messages; send at most 10000"):
            await client(url).chat.completions.create(model="m", messages=[{"role": "user", "content": ""}] * 10_001)


async def test_what_can_never_fit_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: "x")
    longest = max(map(len, sampler.template.tokenizer.get_vocab()))
    room = sampler.sampling.max_episode_tokens - sampler.sampling.least_room
    encode = sampler.template.encode
    encoded: list[int] = []

    def counting(text: str) -> list[int]:
        encoded.append(len(text))
        return encode(text)

    async with gateway(sampler, tmp_path) as (url, _):
        sampler.template.encode = counting  # type: ignore[method-assign]
        for fits, text in ((True, "a"), (False, "a" * 7_900_000), (False, "a" * (room + 1) * longest)):
            encoded.clear()
            if fits:
                await _ask(client(url), text)
            else:
                with pytest.raises(openai.BadRequestError, match=r"has at least \d+ tokens") as caught:
                    await _ask(client(url), text)
                assert caught.value.code == "context_length_exceeded"
            assert bool(encoded) == fits
        encoded.clear()  # the longest token, as often as it fits
        with pytest.raises(openai.BadRequestError, match=r"has \d+ tokens"):
            await _ask(client(url), "a" * room * longest)
        assert max(encoded) > room * longest


HALF = '"\\ud800"'
USER = '{"role": "user", "content": "go"}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {HALF}}}]}}'),
        ("/v1/messages", f'{{"max_tokens": 9, "messages": [{{"role": "user", "content": {HALF}}}]}}'),
        ("/v1/messages/count_tokens", f'{{"messages": [{{"role": "user", "content": {HALF}}}]}}'),
        ("/v1/responses", f'{{"input": {HALF}}}'),
        (
            "/v1/chat/completions",
            f'{{"messages": [{USER}], "tools": [{{"type": "function", "function": {{"name": {HALF}}}}}]}}',
        ),
        ("/v1/messages", f'{{"messages": [{USER}], "tools": [{{"name": {HALF}, "input_schema": {{}}}}]}}'),
        ("/v1/responses", f'{{"input": "go", "tools": [{{"type": "function", "name": {HALF}}}]}}'),
        (
            "/v1/responses",
            '{"input": "go", "tools": [{"type": "function", "name": "f", "parameters": {"most": 1e999}}]}',
        ),
        ("/sessions/one/reward", '{"value": 1' + "0" * 400 + "}"),
        ("/sessions/one/reward", '{"value": 1e308}'),
        ("/sessions/one/end", f'{{"error": {HALF}}}'),
        ("/sessions", '{"group": 1' + "0" * 400 + "}"),
    ],
)
async def test_what_cannot_be_used_is_the_callers_mistake(tmp_path: Path, path: str, body: str) -> None:
    async with gateway(scripted(lambda request, text: "x"), tmp_path) as (url, records):
        await _ask(client(url))
        async with httpx.AsyncClient(base_url=url) as http:
            headers = {**_bearer("one"), "content-type": "application/json"}
            reply = await http.post(path, content=body, headers=headers)
        assert reply.status_code == 400 and reply.json()["error"]["message"]
        records.end("one", {})


@pytest.mark.parametrize("depth", [5_000, 990, 960])
async def test_arguments_that_are_nested_too_deeply_are_the_callers_mistake(tmp_path: Path, depth: int) -> None:
    async with gateway(scripted(lambda request, text: "x", max_episode_tokens=20_000), tmp_path) as (url, _):
        function = {"name": "move", "arguments": "[" * depth + "]" * depth}
        asked = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
        body = {"messages": [{"role": "user", "content": "go"}, asked, {"role": "tool", "content": "x"}]}
        async with httpx.AsyncClient(base_url=url) as http:
            reply = await http.post("/v1/chat/completions", json=body, headers=_bearer("one"))
    assert reply.status_code in ((400,) if depth > 1_000 else (200, 400)), "how deep is too deep, depends on the stack"


def _post(url: str, length: int, sent: int) -> tuple[int, float]:
    """The status that a plain client gets which writes its whole body before it reads, and for how many seconds."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    began = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {length}\r\n\r\n".encode())
        connection.sendall(b"a" * sent)
        reply = b""
        while part := connection.recv(1 << 16):
            reply += part
    assert b'"code":"body_too_large"' in reply
    return int(reply.split()[1]), time.monotonic() - began


async def test_a_body_that_is_too_large_is_read_to_its_end_or_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed with unread data is reset, and loses its response."""
    async with gateway(scripted(lambda request, text: "x"), tmp_path) as (url, _):
        status, _ = await asyncio.to_thread(_post, url, 50_000_000, 50_000_000)
        assert status == 413
        monkeypatch.setattr(app, "_LINGER_SECONDS", 0.2)
        status, seconds = await asyncio.to_thread(_post, url, 50_000_000, 1_000)
        assert status == 413 and 0.2 <= seconds < 5


async def test_a_journal_that_cannot_be_read_fails_its_session_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = scripted(lambda request, text: "x")
    async with gateway(sampler, tmp_path) as (url, records):
        for name in ("cut", "headless", "sound"):
            await _ask(client(url, name))
        records.record("cut").reward(2.0, "")
    journals = tmp_path / "sessions"
    for name, damaged in (("cut", 2), ("headless", 0)):
        lines = (journals / f"{name}.jsonl").read_text().splitlines(keepends=True)
        lines[damaged] = lines[damaged][:9] + lines[damaged]  # as a line that another was written behind
        (journals / f"{name}.jsonl").write_text("".join(lines))
    for _ in range(2):
        async with gateway(sampler, tmp_path) as (url, records):
            assert await _ask(client(url, "sound"), "again") == "x"
            for name in ("cut", "headless"):
                with pytest.raises(openai.APIStatusError, match="is over") as gone:
                    await _ask(client(url, name), "again")
                assert gone.value.status_code == 410
            assert records.counts()["live"] == 1 and records.counts()["over"] == 2
    (failed,) = read_episodes(tmp_path / "episodes")
    assert (failed.end, failed.error) == ("failed", "line 3 of the session's journal cannot be read")
    assert len(failed.turns) == 1
    assert sorted(each.name for each in journals.glob("*.unreadable")) == ["cut.unreadable", "headless.unreadable"]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 2 and f"{journals / 'cut.jsonl'}, line 3" in warnings[0]


async def test_what_a_full_disk_did_not_take_has_not_been(tmp_path: Path) -> None:
    sampler = scripted(lambda request, text: f"reply {len(engine_of(sampler).requests)}")
    journal = tmp_path / "sessions" / "one.jsonl"
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with gateway(sampler, tmp_path) as (url, records), httpx.AsyncClient(base_url=url) as http:
        with small_files(20):
            assert (await http.post("/sessions", json={"name": "one", "group": 0})).status_code == 500
        assert (await http.post("/sessions", json={"name": "one", "group": 0})).json()["member"] == 0
        for _ in range(2):
            before = journal.read_bytes()
            with small_files(len(before) + 20):
                with pytest.raises(openai.InternalServerError):
                    await client(url).chat.completions.create(model="m", messages=messages)
                assert journal.read_bytes() == before
            reply = (await client(url).chat.completions.create(model="m", messages=messages)).choices[0].message
            messages += [reply, {"role": "user", "content": "on"}]
        turns = records.record("one").episode.turns
        assert [turn.fresh for turn in turns] == [True, False] and reply.content == "reply 4"
    async with gateway(sampler, tmp_path) as (url, records):
        repeated = await client(url).chat.completions.create(model="m", messages=messages[:-2])
        assert repeated.choices[0].message == reply
        records.end("one", {})
    (episode,) = read_episodes(tmp_path / "episodes")
    (sample,) = samples_of(episode)
    assert sample.tokens == [*engine_of(sampler).requests[-1].prompt, *episode.turns[-1].reply]


async def _ask(llm: openai.AsyncOpenAI, text: str = "hello") -> str:
    completion = await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return completion.choices[0].message.content or ""


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
