"""The torch engine against the trainer's own scores, and against itself in other company."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.trainer.engines.base import EngineError, Reply, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.lean import LeanDecoder
from starpod.trainer.engines.slot_cache import SlotCache, Span
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import LoraConfig, ModelConfig
from starpod.trainer.models.policy import Policy, build_policy
from tests.trainer.engines.conformance import MAX_CONTEXT, begun, held, make_policy
from tests.trainer.models.tiny_policy import tiny_policy
from tests.waiting import eventually

POLICY = tiny_policy(tiny={"hidden": 64, "heads": 4, "key_value_heads": 2, "intermediate": 96})
STOP = frozenset(range(20))
"""So many that most replies stop before their limit."""


@asynccontextmanager
async def an_engine(policy: Policy = POLICY, **settings: Any) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(policy.model, **{"slots": 8, "max_context": 256, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def request(prompt: list[int], **more: Any) -> Request:
    return Request(prompt, **{"max_tokens": 12, "stop": STOP, **more})


Play = list[tuple[int, Reply]]


async def play(engine: TorchEngine, name: int, wait: Callable[[], Awaitable[None]] | None = None) -> Play:
    """A conversation of several turns: where each reply began, and the reply. `name` decides all that is random."""
    rng = random.Random(name)
    # Some begin as others do.
    context = [random.Random(name % 3).randrange(POLICY.vocabulary) for _ in range(name % 4 * 5)]
    replies = []
    for turn in range(rng.randint(1, 4)):
        context = context + [rng.randrange(POLICY.vocabulary) for _ in range(rng.randint(1, 20))]
        if wait is not None:
            await wait()
        seed = 100 * name + turn
        reply = await engine.generate(
            request(
                context, max_tokens=rng.randint(1, 12), seed=seed, conversation=f"c{name}", top_p=rng.choice([1, 0.8])
            )
        )
        replies.append((len(context), reply))
        context = context + reply.tokens
    engine.forget(f"c{name}")
    return replies


async def alone(names: list[int]) -> dict[int, Play]:
    """Each conversation by itself, in an engine where nothing else ever happens."""
    plays = {}
    for name in names:
        async with an_engine() as engine:
            plays[name] = await play(engine, name)
    return plays


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=14, unique=True),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([1, 7, 2048]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=12)
def test_a_reply_is_the_same_bit_for_bit_in_any_company(
    names: list[int], slots: int, prefill_rows: int, rng: random.Random
) -> None:
    """Whoever else is there, whenever each comes, and whether or not its cache was taken away meanwhile."""

    async def wait() -> None:
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(rng.choice([0, 0, 0.001]))

    async def run() -> None:
        expected = await alone(names)
        async with an_engine(slots=slots, prefill_rows=prefill_rows) as engine:
            plays = await asyncio.gather(*(play(engine, name, wait) for name in names))
        for name, replies in zip(names, plays, strict=True):
            assert replies == expected[name], f"conversation {name} differs"

    asyncio.run(run())


async def test_requests_of_a_lower_order_go_first() -> None:
    """Of those that wait for a slot; of equal ones the first to come."""
    async with an_engine(slots=1) as engine:
        await engine.pause()
        over: list[int] = []

        async def ask(name: int) -> None:
            await engine.generate(request([name], order=name // 2, max_tokens=2, stop=frozenset()))
            over.append(name)

        asking = [asyncio.ensure_future(ask(name)) for name in (6, 2, 0, 3, 1)]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*asking)
    assert over == [0, 1, 2, 3, 6]


@given(st.integers(0, 1000))
@settings(max_examples=10)
def test_the_sampler_and_the_trainer_agree(name: int) -> None:
    async def run() -> Play:
        async with an_engine() as engine:
            # The reply's log-probabilities are those of the whole distribution, so no top_p here.
            context, replies, rng = [], [], random.Random(name)
            for turn in range(4):
                context = context + [rng.randrange(POLICY.vocabulary) for _ in range(rng.randint(1, 20))]
                reply = await engine.generate(request(context, temperature=0.7, seed=turn, conversation="c"))
                replies.append((len(context), reply))
                context = context + reply.tokens
            replies.append((len(context), Reply(context, [], [], "stop")))
            return replies

    *replies, (length, whole) = asyncio.run(run())
    sampled_BL = torch.zeros(1, length, dtype=torch.bool)
    for start, reply in replies:
        sampled_BL[0, start : start + len(reply.tokens)] = True
    with torch.no_grad():
        scores = POLICY.score(torch.tensor([whole.tokens]), torch.tensor([length]), sampled_BL, temperature=0.7)
    sampler_N = torch.tensor([logprob for _, reply in replies for logprob in reply.logprobs])
    torch.testing.assert_close(sampler_N, scores.logprobs_N, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_the_lean_decoder_computes_what_the_modules_do(key_value_heads: int, dtype: Any) -> None:
    """And so do queries that are put together, as they are with several threads."""
    policy = tiny_policy(tiny={"hidden": 64, "heads": 4, "key_value_heads": key_value_heads}, dtype=dtype)
    for parameter in policy.model.parameters():
        # Biases and norms start at 0 and 1, where mistakes would not show.
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    states = []
    for lean, one_query in ((False, True), (True, True), (True, False), (False, False)):
        engine = TorchEngine(policy.model, slots=4, max_context=64)
        engine._cache.one_query = one_query
        cache, model = engine._cache, engine._model
        assert LeanDecoder.fits(model)
        read = LeanDecoder(model, cache).run if lean else partial(cache.run, model.model)
        with torch.inference_mode():
            for spans in (
                [Span(0, 0, [1, 2, 3]), Span(2, 0, [4])],
                [Span(0, 3, [5]), Span(1, 0, [6]), Span(2, 1, [7]), Span(3, 0, [8, 9])],
            ):
                feed = cache.lay_out(spans)
                states.append(read(feed)[torch.tensor(feed.last)].float())
    near = 1e-5 if dtype == "float32" else 5e-2
    for other in (states[2:4], states[4:6], states[6:]):
        torch.testing.assert_close(states[:2], other, atol=near, rtol=near)


async def test_only_what_is_new_of_a_conversation_is_read() -> None:
    async with an_engine() as engine:
        first = await engine.generate(request([5] * 10, stop=frozenset(), max_tokens=4, conversation="c"))
        assert first.finish == "length"
        assert engine.stats().prefilled == 10
        # Of the reply's 4 tokens the last was sampled, but never fed.
        await engine.generate(request([5] * 10 + first.tokens + [6, 7], conversation="c"))
        assert engine.stats().reused == 13
        assert engine.stats().prefilled == 13
        engine.forget("c")
        await engine.generate(request([5] * 10, conversation="c"))
        assert engine.stats().reused == 13
        # Without a name nothing is kept.
        await engine.generate(request([5] * 10))
        await engine.generate(request([5] * 10))
        assert engine.stats().reused == 13


GROUP = list(range(20, 60))


@pytest.mark.parametrize(("slots", "prefill_rows"), [(8, 4096), (8, 7), (3, 4096)])
async def test_what_a_group_shares_is_read_once(slots: int, prefill_rows: int) -> None:
    requests = [request(GROUP, max_tokens=1 + member % 3, seed=member, stop=frozenset()) for member in range(8)]
    requests.append(request([*GROUP[:30], 1, 2, 3], seed=8))
    expected = []
    for each in requests:
        async with an_engine() as engine:
            expected.append(await engine.generate(each))
    async with an_engine(slots=slots, prefill_rows=prefill_rows) as engine:
        await engine.pause()  # until all are there
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        await asyncio.sleep(0)
        await engine.resume()
        replies = await asyncio.gather(*tasks)
        stats = engine.stats()
    assert replies == expected
    assert stats.prefilled + stats.reused == 8 * 40 + 33
    if slots == 8:
        assert stats.prefilled == 40 + 7 + 3


async def test_groups_whose_prompts_begin_alike_read_that_once_too() -> None:
    """The first of each waits for the common beginning, its group for the rest."""
    prompts = [[*GROUP, *range(group, group + 10)] for group in (1, 2, 3)]
    requests = [request(prompt, max_tokens=3, seed=member) for member in range(4) for prompt in prompts]
    expected = []
    for each in requests:
        async with an_engine() as engine:
            expected.append(await engine.generate(each))
    async with an_engine(slots=12) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        await asyncio.sleep(0)
        await engine.resume()
        assert await asyncio.gather(*tasks) == expected
        assert engine.stats().prefilled == len(GROUP) + 3 * 10 + 9


async def test_a_leader_that_is_cancelled_leaves_nobody_waiting() -> None:
    async with an_engine(prefill_rows=4) as engine:
        leader = asyncio.create_task(engine.generate(request(GROUP)))
        follower = asyncio.create_task(engine.generate(request(GROUP, seed=1)))
        await eventually(lambda: engine.stats().prefilled > 0)
        leader.cancel()
        reply = await asyncio.wait_for(follower, 60)
    async with an_engine() as engine:
        assert reply == await engine.generate(request(GROUP, seed=1))


async def test_a_stop_id_ends_the_reply_and_is_part_of_it() -> None:
    async with an_engine() as engine:
        greedy = await engine.generate(request([1, 2, 3], stop=frozenset(), temperature=0, max_tokens=6))
        assert greedy.finish == "length"
        assert greedy.logprobs == [0.0] * 6
        stop = greedy.tokens[3]
        cut = await engine.generate(request([1, 2, 3], stop=frozenset([stop]), temperature=0, max_tokens=6))
        assert cut.finish == "stop"
        assert cut.tokens == greedy.tokens[: greedy.tokens.index(stop) + 1]
        counted = engine.stats()
        assert (counted.requests, counted.sampled) == (2, len(greedy.tokens) + len(cut.tokens))
        assert (counted.running, counted.waiting, counted.slots) == (0, 0, 8)


async def test_greedy_replies_are_those_of_the_plain_model() -> None:
    tokens = [3, 1, 4, 1, 5]
    async with an_engine() as engine:
        reply = await engine.generate(request(tokens, stop=frozenset(), temperature=0, max_tokens=8))
    for token in reply.tokens:
        logits = POLICY.model(torch.tensor([tokens])).logits[0, -1]
        assert token == logits.argmax()
        tokens = [*tokens, token]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 256}, "leaves no room"),
        ({"prompt": [10**6]}, "not among the model's"),
        ({"prompt": [-1]}, "not among the model's"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "top_p": 0.0}, "top_p"),
    ],
)
async def test_requests_that_cannot_be_served(wrong: dict[str, Any], message: str) -> None:
    async with an_engine() as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate(request(**wrong))


async def test_a_reply_ends_where_the_context_does() -> None:
    async with an_engine(max_context=12) as engine:
        reply = await engine.generate(request([1] * 10, stop=frozenset(), max_tokens=50))
        assert reply.finish == "length"
        assert len(reply.tokens) == 2


# --- the hand-over of weights ----------------------------------------------------------------------------------------


async def test_nothing_is_sampled_while_paused() -> None:
    async with an_engine() as engine:
        running = asyncio.create_task(engine.generate(request([1], stop=frozenset(), max_tokens=200)))
        with held(engine):
            await eventually(lambda: engine.stats().sampled > 3)
            pausing = await begun(engine.pause())
            assert not pausing.done()
        await pausing
        waiting = asyncio.create_task(engine.generate(request([1, 2])))
        sampled = engine.stats().sampled
        assert sampled < 200
        await asyncio.sleep(0.05)
        assert engine.stats().sampled == sampled
        assert engine.stats().waiting == 1
        await engine.resume()
        assert len((await running).tokens) == 200
        await waiting


async def test_new_weights_are_used_from_the_next_token_on_and_old_caches_are_dropped() -> None:
    policy = tiny_policy()
    async with an_engine(policy) as engine:
        await engine.generate(request([1] * 9, conversation="c"))
        running = asyncio.create_task(engine.generate(request([1], stop=frozenset(), max_tokens=200, temperature=0)))
        with held(engine):
            await eventually(lambda: engine.stats().running == 1)
            pausing = await begun(engine.pause())
        await pausing
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
        await engine.load(7, policy.model)
        await engine.resume()
        reply = await running
        assert set(reply.versions) == {0, 7}
        assert reply.versions == sorted(reply.versions)
        # The rest goes on from the whole context, read with the new weights.
        first = reply.versions.index(7)
        context = [1, *reply.tokens]
        logits = policy.model(torch.tensor([context])).logits[0]
        assert context[first + 1 :] == logits[first:-1].argmax(-1).tolist()
        # Only what was running was read again; what was kept for later was dropped.
        reused = engine.stats().reused
        await engine.generate(request([1] * 9, conversation="c"))
        assert engine.stats().reused == reused


@pytest.mark.parametrize("tied", [False, True], ids=["two embeddings", "tied embeddings"])
async def test_weights_of_another_model_object_are_taken_over(tied: bool) -> None:
    policy, other = (tiny_policy(tiny={"hidden": 64, "heads": 4, "tied": tied}, seed=seed) for seed in (1, 2))
    async with an_engine(policy) as engine, an_engine(other) as expected:
        await engine.pause()
        await engine.load(1, other.model)
        await engine.resume()
        ask = request([1, 2, 3])
        assert (await engine.generate(ask)).tokens == (await expected.generate(ask)).tokens


async def test_loading_wants_a_pause_and_a_model_of_the_same_shape() -> None:
    async with an_engine() as engine:
        with pytest.raises(RuntimeError, match="pause"):
            await engine.load(1, POLICY.model)
        await engine.pause()
        with pytest.raises(ValueError, match="other parameters"):
            await engine.load(1, tiny_policy().model)


async def test_a_models_modules_serve_where_the_lean_decoder_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the architecture, replies are the same in any company."""
    monkeypatch.setattr(LeanDecoder, "fits", lambda model: False)
    names = list(range(6))
    expected = await alone(names)
    async with an_engine(slots=3, prefill_rows=7) as engine:
        assert engine._lean is None
        plays = await asyncio.gather(*(play(engine, name) for name in names))
    assert dict(zip(names, plays, strict=True)) == expected


async def test_adapters_are_sampled_with(tmp_path: Any) -> None:
    tiny_policy().save(tmp_path)
    config = ModelConfig(name=str(tmp_path), lora=LoraConfig(rank=4))
    policy = build_policy(config, texts=None, critic="none", seed=0)
    async with an_engine(policy) as engine:
        before = await engine.generate(request([1, 2, 3], max_tokens=1))
        await engine.pause()
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        await engine.load(1, policy.model)
        await engine.resume()
        after = await engine.generate(request([1, 2, 3], max_tokens=1))
    assert before.logprobs != after.logprobs


def test_the_trainers_model_is_left_as_it_is() -> None:
    policy = tiny_policy(gradient_checkpointing=True)
    TorchEngine(policy.model, slots=1, max_context=16)
    assert policy.model.config._attn_implementation == "sdpa"
    assert policy.model.model.layers[0].gradient_checkpointing


# --- when things go wrong --------------------------------------------------------------------------------------------


async def test_an_error_reaches_everyone_who_waits_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_engine(slots=1) as engine:

        def explode(*_: Any) -> None:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(SlotCache, "attend", explode)
            asked = [engine.generate(request([1, 2], conversation=str(i))) for i in range(3)]
            for result in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(result, MemoryError)
        assert (await engine.generate(request([1, 2]))).tokens
        assert engine.stats().running == 0


async def test_closing_fails_calls_in_flight_and_later_ones() -> None:
    async with an_engine(slots=1) as engine:
        asked = [asyncio.create_task(engine.generate(request([1], stop=frozenset(), max_tokens=200))) for _ in range(3)]
        with held(engine):
            await eventually(lambda: engine.stats().sampled > 3)
            closing = await begun(engine.close())
        await closing
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, RuntimeError)
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(request([1]))


async def test_a_cancelled_call_leaves_its_slot_to_others() -> None:
    async with an_engine(slots=1) as engine:
        gone = asyncio.create_task(engine.generate(request([1], stop=frozenset(), max_tokens=250)))
        with held(engine):
            await eventually(lambda: engine.stats().sampled > 0)
            gone.cancel()
            await asyncio.sleep(0)  # the engine learns of it when the call is thrown out of its wait
        await engine.generate(request([1, 2]))
        assert engine.stats().sampled < 250


async def test_forgetting_while_a_reply_is_sampled_keeps_nothing() -> None:
    async with an_engine() as engine:
        task = asyncio.create_task(
            engine.generate(request([1] * 5, stop=frozenset(), max_tokens=100, conversation="c"))
        )
        with held(engine):
            await eventually(lambda: engine.stats().sampled > 0)
            engine.forget("c")
        await task
        await engine.generate(request([1] * 5, conversation="c"))
        assert engine.stats().reused == 0


async def test_slots_follow_from_a_budget_for_the_cache() -> None:
    policy = make_policy()
    small = {"slots": 1000, "cache_gib": 100 / 2**20}
    engine = build_engine(EngineConfig.model_validate(small), policy, max_context=MAX_CONTEXT)
    assert isinstance(engine, TorchEngine)
    # A layer's keys and values of 64 tokens, 2 heads of 8 numbers of 4 bytes: 8 KiB a slot, and one for padding.
    assert engine.stats().slots == 11
    assert engine._cache.layers.nbytes == 12 * 8 * 2**10
    requests = [Request(prompt=[5, index], max_tokens=3, stop=frozenset()) for index in range(20)]
    assert [len(reply.tokens) for reply in await asyncio.gather(*map(engine.generate, requests))] == [3] * 20
    await engine.close()
    large = build_engine(EngineConfig(slots=3), policy, max_context=MAX_CONTEXT)
    assert large.stats().slots == 3
    await large.close()
    with pytest.raises(EngineError, match=r"takes 0\.00 GiB.* raise it, or lower sampling\.max_episode_tokens"):
        build_engine(EngineConfig(cache_gib=15 / 2**20), policy, max_context=MAX_CONTEXT)
