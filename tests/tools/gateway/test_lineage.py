"""Training uses exactly the sampled ids, whatever a client does with its history."""

import asyncio
import itertools
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from starpod.gateway.lineage import ChatLayout
from starpod.gateway.records import Records
from starpod.gateway.requests import Ask, Message
from starpod.gateway.session import Replied, RolloutSession, Sampler
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.prompts.formats.base import ReplyCall
from starpod.trainer.prompts.template import Template
from tests.tools.gateway.sampling import RandomEngine, engine_of, scripted
from tests.trainer.chat_templates import TEMPLATES, tokenizer

WORDS = ["Up", " then", " this", "<think>", "</think>", "\n\n", "é", " |", "a thought", "<tool_call>", "</tool_call>"]
WORDS += ['<tool_call>{"name": "move", "arguments": {"to": "Up"}}</tool_call>']
TOOL = {"type": "function", "function": {"name": "move", "description": "Moves.", "parameters": {"type": "object"}}}


@dataclass
class Client:
    """An agent that continues, repeats, cuts, condenses and rewrites its history, and calls helpers."""

    session: RolloutSession
    rng: random.Random
    histories: list[tuple[Message, ...]] = field(default_factory=list)

    async def turn(self) -> None:
        choice = self.rng.random()
        history = self.histories[-1] if self.histories else (Message("system", "be good"),)
        if choice < 0.05:
            history = (Message("system", f"helper {self.rng.randint(0, 9)}"),)  # of its own conversation
        elif choice < 0.15 and self.histories:
            history = self.rng.choice(self.histories)  # back to an earlier state
        elif choice < 0.2 and len(history) > 5:
            history = (*history[:1], *history[-2:])  # the oldest rounds are dropped
            if history[1].role == "assistant":
                history = (history[0], Message("user", "so far"), *history[1:])
        elif choice < 0.25:
            history = (*history[:1], Message("user", "a summary of all that"))
        elif choice < 0.3 and history[-1].role == "assistant":
            history = (*history[:-1], Message("assistant", "what the client says was said"))
        await self.ask(history)

    async def ask(self, history: tuple[Message, ...]) -> None:
        last = history[-1]
        new = [Message("tool", f"result {self.rng.randint(0, 99)}") for _ in last.calls]
        if not new or self.rng.random() < 0.2:
            new.append(Message("user", self.rng.choice(["go", " on ", "a|b", "<|im_end|> this", "é\n"])))
        ask = Ask((*history, *new), (TOOL,), seed=str(self.rng.randint(0, 3)))
        if self.rng.random() < 0.1:
            answers = await asyncio.gather(*(self.session.complete(replace(ask)) for _ in range(3)))
            assert len({answer.id for answer in answers}) == 1
        answer = await self.session.complete(ask)
        message = answer.message
        if self.rng.random() < 0.3:  # spelt in another way by the client
            calls = tuple(ReplyCall(call.name, call.arguments.replace(": ", ":"), "other") for call in message.calls)
            message = Message("assistant", f" {message.text}\n", calls)
        self.histories.append((*ask.messages, message))


async def play(name: str, turns: int, seed: int) -> tuple[RandomEngine, list[Turn], Template]:
    template = Template(tokenizer(name))
    engine = RandomEngine(template, WORDS, seed)
    sampling = SamplingConfig(max_reply_tokens=60, max_episode_tokens=100_000, min_reply_tokens=1)
    took: list[Turn] = []
    sampler = Sampler(engine=engine, layout=ChatLayout(template), sampling=sampling)
    for number in itertools.count(1):
        if len(took) >= turns:
            break
        session = RolloutSession(f"s{seed}-{number}", sampler, lambda replied: took.append(replied.turn))
        client = Client(session, random.Random(f"{seed}/{number}"))
        for _ in range(10):
            await asyncio.gather(*(client.turn() for _ in range(random.Random(number).choice([1, 1, 3]))))
            for _ in range(2):
                await client.turn()
        took_before = len(took)
        session.close("over")
        assert len(took) == took_before
    return engine, took, template


def check_sampled(replies: list[tuple[Request, Reply]], turns: list[Turn]) -> None:
    """Each turn's ids, log-probabilities and versions are those of one reply, in the context that the engine saw."""
    episode = Episode(0, 0, "e", turns=turns)
    found, context = [], []
    for turn in turns:
        context = [*([] if turn.fresh else context), *turn.prompt]
        found.append((context, turn.reply, turn.logprobs, turn.versions))
        context = [*context, *turn.reply]
    sampled = [(request.prompt, reply.tokens, reply.logprobs, reply.versions) for request, reply in replies]
    assert sorted(found) == sorted(sampled)
    trained = sum(sum(sample.sampled) for sample in samples_of(episode))
    assert trained == sum(len(reply.tokens) for _, reply in replies), "each sampled id is trained on once"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 100) for name in TEMPLATES),
        pytest.param("llama3", 1_500, marks=pytest.mark.minutes),
        pytest.param("qwen3", 1_500, marks=pytest.mark.minutes),  # drops past thoughts
    ],
)
async def test_trained_ids_are_the_sampled_ones(name: str, count: int) -> None:
    engine, turns, template = await play(name, count, seed=1)
    check_sampled(engine.sampled, turns)
    if template.extends:
        assert sum(not turn.fresh for turn in turns) > count / 10, "an unedited history continues the sample"


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_conversation_that_only_grows_extends_its_stream(name: str) -> None:
    template = Template(tokenizer(name))
    engine = RandomEngine(template, ["Up", " then", "this", "é", "ans"], seed=3)
    sampler = Sampler(engine=engine, layout=ChatLayout(template), sampling=SamplingConfig(max_reply_tokens=30))
    session = RolloutSession("one", sampler, lambda replied: None)
    messages: tuple[Message, ...] = (Message("system", "be good"),)
    for number in range(10):
        messages = (*messages, Message("user", f"question {number}"))
        answer = await session.complete(Ask(messages))
        messages = (*messages, answer.message)
    for (before, reply), (after, _) in zip(engine.sampled, engine.sampled[1:], strict=False):
        stream = [*before.prompt, *reply.tokens]
        if template.extends:
            assert after.prompt[: len(stream)] == stream


@pytest.mark.parametrize(("name", "fresh"), [("qwen3", True), ("chatml", False)])
async def test_dropped_thoughts_begin_a_sample_where_the_template_drops_them(name: str, fresh: bool) -> None:
    sampler = scripted(lambda request, text: "<think>a thought</think>Up", name)
    took: list[Replied] = []
    session = RolloutSession("one", sampler, took.append)
    first = await session.complete(Ask((Message("user", "go"),)))
    assert (first.thought, first.text) == ("a thought", "Up")
    await session.complete(Ask((Message("user", "go"), first.message, Message("user", "on"))))
    assert [replied.turn.fresh for replied in took] == [True, fresh]
    shown = sampler.template.tokenizer.decode(engine_of(sampler).requests[-1].prompt)
    assert ("a thought" in shown) == (not fresh)


async def test_a_stop_text_cuts_the_reply_where_it_ends() -> None:
    sampler = scripted(lambda request, text: "Thought. Observation: made up")
    took: list[Replied] = []
    session = RolloutSession("one", sampler, took.append)
    answer = await session.complete(Ask((Message("user", "go"),), stop=("Observation:",)))
    assert (answer.text, answer.finish) == ("Thought. ", "stop")
    (replied,) = took
    assert sampler.template.decode(replied.turn.reply) == "Thought. Observation:"
    assert len(replied.turn.reply) == len(replied.turn.logprobs) == len(replied.turn.versions)


async def test_sampling_is_the_gateways_and_streams_are_the_sessions() -> None:
    sampler = replace(scripted(lambda request, text: "x"), temperature=0.5)
    for name in ("one", "two"):
        await RolloutSession(name, sampler, lambda replied: None).complete(Ask((Message("user", "go"),), max_tokens=3))
    requests: list[Request] = engine_of(sampler).requests
    assert {request.temperature for request in requests} == {0.5}
    assert {request.max_tokens for request in requests} == {3}
    assert len({request.seed for request in requests}) == 2


async def test_replies_of_equal_text_and_different_thoughts_are_distinguished_after_a_restart(tmp_path: Path) -> None:
    """A client sees the same text of both, so that both end the same history; only one of them has the child."""
    begun, go = asyncio.Event(), asyncio.Event()
    sampler = scripted(lambda request, text: "Up")
    engine = engine_of(sampler)
    prompts: list[list[int]] = []

    async def generate(request: Request) -> Reply:
        prompts.append(request.prompt)
        text = {1: "<think>a</think>Up", 2: "later", 3: "<think>a much longer thought</think>Up"}.get(len(prompts), "x")
        if text == "later":
            begun.set()
            await go.wait()
        ids = engine.template.encode_reply(text)
        return Reply(ids, [-0.5] * len(ids), [0] * len(ids), "stop")

    engine.generate = generate  # type: ignore[method-assign]
    records = Records(sampler, tmp_path)
    session = records.find("one")
    user = Message("user", "go")
    first = await session.complete(Ask((user,), seed="1"))
    child = asyncio.ensure_future(session.complete(Ask((user, first.message, Message("user", "on")))))
    await begun.wait()
    other = await session.complete(Ask((user,), seed="2"))
    assert first.message == other.message and [first.thought, other.thought] == ["a", "a much longer thought"]
    go.set()
    history = (user, first.message, Message("user", "on"), (await child).message)
    more = Ask((*history, Message("user", "more")))
    turns = records.record("one").episode.turns
    restarted = Records(sampler, tmp_path)
    restarted.restore()
    for each in (session, restarted.find("one")):
        await each.complete(more)
    assert prompts[-1] == prompts[-2]
    assert prompts[-1][: len(prompts[1]) + len(turns[2].reply)] == [*prompts[1], *turns[2].reply]
