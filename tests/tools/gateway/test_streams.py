"""Replies that are sent while they are sampled, and requests whose clients leave."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from starpod.gateway.lineage import ChatLayout
from starpod.gateway.requests import Answer, Ask, Choice, Message
from starpod.gateway.serving import Serving
from starpod.gateway.session import RolloutSession, Sampler
from starpod.gateway.streams import PieceReader
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.engines.base import Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.output.files import FolderLocked
from starpod.trainer.prompts.formats.table import FORMATS
from starpod.trainer.prompts.template import Template
from tests.tools.gateway.kills import begin, kill_child, save_model
from tests.tools.gateway.sampling import engine_of, scripted
from tests.tools.gateway.test_sockets import APIS, Api, data_of, each_api, gateway
from tests.trainer.chat_templates import tokenizer
from tests.trainer.engines.conformance import held
from tests.trainer.models.tiny_policy import tiny_policy
from tests.trainer.prompts.formats.replies import TOOLS, reply
from tests.waiting import eventually

USER = Message("user", "go")
TEMPLATES = ("chatml", "reasoner", "sentencepiece", "tiny")


def session_of(sampler: Sampler) -> RolloutSession:
    return RolloutSession("one", sampler, on_reply=lambda replied: None)


async def streamed(session: RolloutSession, ask: Ask) -> tuple[dict[str, str], int, Answer]:
    """The joined pieces of a reply by kind, the number of pieces before the reply was complete, and the reply."""
    joined, early = dict[str, str](), 0
    with session.follow(ask) as live:
        await live.head()
        async for kind, piece in live.pieces():
            joined[kind] = joined.get(kind, "") + piece
            early += not live.sampling.done()
        return joined, early, live.result()


def ask_for(rng: random.Random, text: str) -> Ask:
    """A request with any of the fields that change what is shown of a text."""
    start = rng.randrange(max(1, len(text)))
    return Ask(
        (USER,),
        tools=tuple(TOOLS) if rng.random() < 0.8 else (),
        choice=Choice("none") if rng.random() < 0.1 else Choice(),
        one_call=rng.random() < 0.3,
        stop=(text[start : start + rng.randint(1, 4)], "never", "") if rng.random() < 0.3 else (),
        max_tokens=rng.choice((None, None, rng.randint(1, 60))),
        stream=True,
    )


@pytest.mark.parametrize("name", FORMATS)
async def test_pieces_add_up_to_the_reply(name: str) -> None:
    """Wherever it is cut: inside of characters, marks and stop texts."""
    pieces = 0
    for template in TEMPLATES:
        rng = random.Random(f"{name}/{template}")
        limits = {"max_reply_tokens": 3000, "max_episode_tokens": 9000}
        sampler = scripted(lambda request, prompt: "", template, calls=name, **limits)
        opening = sampler.template.opening
        for seed in range(8):
            before, after = rng.choice(("", " ", "\n é", "<", "\ufffd")), rng.choice(("", "\n", "\ufffd"))
            text = opening + before + reply(FORMATS[name], seed).text + after
            engine_of(sampler).say = lambda request, prompt, text=text: text
            engine_of(sampler).burst = rng.choice((1, 1, 2, 5, 1000))
            ask = ask_for(rng, text)
            joined, early, answer = await streamed(session_of(sampler), ask)
            whole = await session_of(sampler).complete(replace(ask, stream=False))
            assert replace(answer, created=0) == replace(whole, created=0)
            assert joined.get("thought") == whole.thought
            assert joined.get("text") == (whole.text if whole.text or not whole.calls else None)
            pieces += early
    assert pieces > 8 * len(TEMPLATES)


@pytest.mark.parametrize("name", ["chatml", "sentencepiece"])
def test_bytes_that_are_no_text_are_shown_as_they_end_up_and_decoded_a_few_times(name: str) -> None:
    made = Template(tokenizer(name))
    (lead, *_), letter = made.encode("€")[-3:], made.encode("a")[-1]
    pool = [*made.encode("é")[-2:], *made.encode("€")[-3:], letter]
    decode, work = made.decode, [0]

    def counted(ids: Sequence[int]) -> str:
        work[0] += len(ids)
        return decode(ids)

    made.decode = counted  # type: ignore[method-assign]

    def read(ids: Sequence[int]) -> str:
        draft: Any = SimpleNamespace(ask=Ask((USER,)), opened="")
        reader = PieceReader(made, draft)
        return "".join(piece for id_ in ids for _, piece in reader.feed([id_]))

    for seed in range(20):
        ids = [*random.Random(seed).choices(pool, k=40), letter]
        assert read(ids) == decode(ids)
    costs = []
    for count in (100, 400):
        work[0] = 0
        read([lead] * count + [letter])
        costs.append(work[0])
    assert costs[1] <= 5 * costs[0]


# --- an engine whose process dies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
@each_api
async def test_a_reply_that_is_sampled_again_continues_or_fails(api: Api, same: bool, tmp_path: Path) -> None:
    """Ids that are known are skipped. If they differ, the stream fails, and nothing is recorded."""
    sampler = scripted(lambda request, prompt: "one two three")
    generate, died = engine_of(sampler).generate, False

    async def die_once(request: Request) -> Any:
        nonlocal died
        if request.on_tokens and not died:
            died = True
            ids = sampler.template.encode("one two four"[: 7 if same else None])
            request.on_tokens(0, ids)
            await asyncio.sleep(0.01)
        return await generate(request)

    engine_of(sampler).generate = die_once  # type: ignore[method-assign]
    async with gateway(sampler, tmp_path) as it:
        events = data_of((await it.post(api.path, {**api.body, "stream": True})).text)
        assert len(it.turns()) == same
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == list(range(len(numbers)))
        if not same:
            assert "its new reply differs" in events[-1].get("error", events[-1])["message"]
        assert api.read((await it.post(api.path, api.body)).json()).text == "one two three"
        assert len(it.turns()) == 1
    shown = [text_of(event) for event in events]
    assert "".join(shown) == ("one two three" if same else "one two four")


def text_of(event: Any) -> str:
    """The text of an event of any API."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if "choices" in event:
        return str(event["choices"][0]["delta"].get("content") or "")
    return str(event.get("delta", {}).get("text", "")) if event.get("type") == "content_block_delta" else ""


async def test_a_killed_engine_is_not_to_be_seen_in_a_stream(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    ask = Ask((USER,), stream=True)
    answers, kills = [], 0
    with ExitStack() as stack:
        engine = begin(stack, "engine", str(model))
        for name in ("calm", "killed"):
            serving = Serving(
                model=str(model), folder=tmp_path / name, engine="vllm_remote", urls=(engine.address,), max_tokens=100
            )
            async with serving.start(1, 1e9) as records:
                session = records.begin("one", {}).session
                records.sampler.engine._servers[0]._retries = 100  # type: ignore[attr-defined]  # a slow machine
                following = asyncio.ensure_future(streamed(session, ask))
                if name == "killed":
                    with session.follow(ask) as live:
                        await live.head()
                    kills += kill_child(engine)
                joined, early, answer = await following
                assert joined["text"] == answer.text and early
                answers.append(replace(answer, created=0))
    assert kills == 1 and answers[0] == answers[1]


async def test_two_gateways_do_not_write_the_same_folder(tmp_path: Path) -> None:
    serving = Serving(model=str(save_model(tmp_path / "model")), folder=tmp_path / "out", max_tokens=10)
    async with serving.start(1, 1e9):
        with pytest.raises(FolderLocked, match=r"process \d+ on "):
            async with serving.start(1, 1e9):
                pass


# --- over sockets -----------------------------------------------------------------------------------------------------


@each_api
async def test_the_first_event_arrives_before_the_last_id_is_sampled(api: Api, tmp_path: Path) -> None:
    sampler, heard = scripted(lambda request, prompt: "<think>I see</think>one two three"), asyncio.Event()
    generate = engine_of(sampler).generate

    async def wait_in_the_middle(request: Request) -> Any:
        assert request.on_tokens
        request.on_tokens(0, sampler.template.encode("<think>I see</think>one"))
        await heard.wait()
        return await generate(request)

    engine_of(sampler).generate = wait_in_the_middle  # type: ignore[method-assign]
    text = ""
    async with gateway(sampler, tmp_path) as it:
        headers = {"authorization": "Bearer one"}
        async with it.http.stream("POST", api.path, json={**api.body, "stream": True}, headers=headers) as response:
            async for line in response.aiter_lines():
                text += "".join(map(text_of, data_of(line)))
                if text == "one":
                    heard.set()
    assert text == "one two three"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engines_slot(tmp_path: Path, stream: bool) -> None:
    """The engine has one slot, so another session's reply is sampled only after the cancelled one."""
    policy = tiny_policy(tiny={"positions": 4000})
    template, engine = Template(policy.tokenizer), TorchEngine(policy.model, slots=1, max_context=4000)
    template.stop = frozenset()  # else a reply might end by itself
    sampling = SamplingConfig(max_reply_tokens=3800, max_episode_tokens=4000)
    sampler = Sampler(engine=engine, layout=ChatLayout(template), sampling=sampling)
    path, body = APIS["chat"].path, {"messages": [{"role": "user", "content": "go"}], "stream": stream}
    async with gateway(sampler, tmp_path) as it:
        asking = asyncio.ensure_future(it.post(path, body))
        await eventually(lambda: engine.stats().sampled)
        with held(engine):
            other = asyncio.ensure_future(it.post(path, {**body, "max_tokens": 3, "stream": False}, key="two"))
            await eventually(lambda: engine.stats().waiting)
            asking.cancel()
        assert (await other).json()["usage"]["completion_tokens"] == 3
        assert engine.stats().sampled < 3800 and not engine.stats().running
        assert not it.turns() and not it.records.record("one").session.sampling
        again = await it.post(path, {**body, "max_tokens": 2})
        assert again.status_code == 200 and len(it.turns()) == 1
    await engine.close()


async def test_a_reply_is_sampled_as_long_as_anybody_waits(tmp_path: Path) -> None:
    sampler, go = scripted(lambda request, prompt: "x"), asyncio.Event()
    generate = engine_of(sampler).generate

    async def wait(request: Request) -> Any:
        await go.wait()
        return await generate(request)

    engine_of(sampler).generate = wait  # type: ignore[method-assign]
    session, ask = session_of(sampler), Ask((USER,))
    first, second = (asyncio.ensure_future(session.complete(ask)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    go.set()
    assert (await second).text == "x" and len(engine_of(sampler).requests) == 1
