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
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import MAX_CONTEXT, held, make_policy
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


ALONE: dict[int, Play] = {}
"""Plays by name, each in an engine where nothing else ever happens."""


async def alone(names: list[int], plays: dict[int, Play]) -> dict[int, Play]:
    """Completes the plays by those of these names, and returns these."""
    for name in set(names) - set(plays):
        async with an_engine() as engine:
            plays[name] = await play(engine, name)
    return {name: plays[name] for name in names}


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
        expected = await alone(names, ALONE)
        async with an_engine(slots=slots, prefill_rows=prefill_rows) as engine:
            plays = await asyncio.gather(*(play(engine, name, wait) for name in names))
        for name, replies in zip(names, plays, strict=True):
            assert replies == expected[name], f"conversation {name} differs"

    asyncio.run(run())


async def test_requests_of_a_lower_order_go_first() -> None:
    """This applies to requests that wait for a slot. With equal order, the first one comes first."""
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_the_lean_decoder_computes_what_the_modules_do(key_value_heads: int, dtype: Any) -> None:
    """Queries that several threads stack together give the same result, too."""
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
ONE_GROUP = [request(GROUP, max_tokens=1 + member % 3, seed=member, stop=frozenset()) for member in range(8)]
ONE_GROUP.append(request([*GROUP[:30], 1, 2, 3], seed=8))
# The first of each group waits for the common beginning, its group for the rest.
THREE_GROUPS = [
    request([*GROUP, *range(group, group + 10)], max_tokens=3, seed=member)
    for member in range(4)
    for group in (1, 2, 3)
]


@pytest.mark.parametrize(
    ("requests", "slots", "prefill_rows", "prefilled"),
    [
        (ONE_GROUP, 8, 4096, 40 + 7 + 3),
        (ONE_GROUP, 8, 7, 40 + 7 + 3),
        (ONE_GROUP, 3, 4096, None),  # some come when the first ones are gone
        (THREE_GROUPS, 12, 4096, 40 + 3 * 10 + 9),
    ],
)
async def test_what_prompts_share_is_read_once(
    requests: list[Request], slots: int, prefill_rows: int, prefilled: int | None
) -> None:
    expected = []
    for each in requests:
        async with an_engine() as engine:
            expected.append(await engine.generate(each))
    async with an_engine(slots=slots, prefill_rows=prefill_rows) as engine:
        await engine.pause()  # until all are there
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        await asyncio.sleep(0)
        await engine.resume()
        assert await asyncio.gather(*tasks) == expected
        stats = engine.stats()
    assert stats.prefilled + stats.reused == sum(len(each.prompt) for each in requests)
    assert prefilled in (None, stats.prefilled)


async def test_a_leader_that_is_cancelled_leaves_nobody_waiting() -> None:
    async with an_engine(prefill_rows=4) as engine:
        leader = asyncio.create_task(engine.generate(request(GROUP)))
        follower = asyncio.create_task(engine.generate(request(GROUP, seed=1)))
        await eventually(lambda: engine.stats().prefilled > 0)
        leader.cancel()
        reply = await asyncio.wait_for(follower, 60)
    async with an_engine() as engine:
        assert reply == await engine.generate(request(GROUP, seed=1))


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"top_p": 0.0}, {"temperature": -1.0}])
async def test_requests_that_cannot_be_served(wrong: dict[str, Any]) -> None:
    async with an_engine() as engine:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            await engine.generate(request([1], **wrong))


async def test_a_model_of_another_shape_is_not_loaded() -> None:
    async with an_engine() as engine:
        await engine.pause()
        with pytest.raises(ValueError, match="different parameters"):
            await engine.load(1, tiny_policy().model)


async def test_a_models_modules_serve_where_the_lean_decoder_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the architecture, replies are the same in any company."""
    monkeypatch.setattr(LeanDecoder, "fits", lambda model: False)
    names = list(range(6))
    expected = await alone(names, {})
    async with an_engine(slots=3, prefill_rows=7) as engine:
        assert engine._lean is None
        plays = await asyncio.gather(*(play(engine, name) for name in names))
    assert dict(zip(names, plays, strict=True)) == expected


def test_the_trainers_model_is_left_as_it_is() -> None:
    policy = tiny_policy(gradient_checkpointing=True)
    attention = policy.model.config._attn_implementation
    TorchEngine(policy.model, slots=1, max_context=16)
    assert policy.model.config._attn_implementation == attention
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
    with pytest.raises(EngineError, match=r"0\.00 GiB.*sampling\.max_episode_tokens"):
        build_engine(EngineConfig(cache_gib=15 / 2**20), policy, max_context=MAX_CONTEXT)
