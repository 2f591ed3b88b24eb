"""Requirements for every engine, whatever samples behind it."""

import asyncio
import copy
import json
import os
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.structure import join
from starpod.trainer.engines.base import Engine, Reply, Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy
from tests.waiting import eventually

MAX_CONTEXT = 64
TINY = {
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "intermediate": 32,
    "vocabulary": 330,
    "positions": MAX_CONTEXT,
}


ROUNDING = 0.25 if torch.cuda.is_available() else 1e-3
"""Of log-probabilities, in nats. On a GPU vLLM's attention multiplies in TF32, which moves one reply of ten of the
tests' sharp policy by a tenth."""


def make_policy(seed: int = 1, *, head: int = 8, **shape: Any) -> Policy:
    """A tiny policy whose distribution is far from uniform, so that wrong weights show. head: width of its heads."""
    config = ModelConfig.model_validate({"name": "tiny", "tiny": TINY | {"hidden": 2 * head} | shape})
    policy = build_policy(config, texts=["Up Down Left Right"], critic="none", seed=seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4)
    return policy


def make_pretrained_policy() -> Policy:
    """Return a policy with SmolLM2-135M-Instruct."""
    return build_policy(ModelConfig(name="smollm2"), texts=None, critic="none", seed=0)


def changed(policy: Policy, seed: int = 7, *, scale: float = 0.3) -> torch.nn.Module:
    """The policy's model with other weights, all of which differ by about `scale`."""
    model = copy.deepcopy(policy.model)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * scale)
    return model


def logprobs_under(model: torch.nn.Module, prompt: list[int], reply: list[int], temperature: float) -> list[float]:
    """Return the model's log-probabilities of the reply's tokens, computed by one plain forward pass."""
    tokens = [*prompt, *reply]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float() / (temperature or 1.0)
    places = logits.log_softmax(-1)
    return [float(places[len(prompt) - 1 + index, token]) for index, token in enumerate(reply)]


def assert_same(replies: Sequence[Reply], expected: Sequence[Reply]) -> None:
    """Check that tokens are equal, and log-probabilities up to the rounding that depends on the batch."""
    for reply, other in zip(replies, expected, strict=True):
        assert reply.tokens == other.tokens
        assert reply.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)


async def assert_keeps_structure(engine: Engine, policy: Policy) -> None:
    """Check that replies have a structure, and that the trainer gives them the engine's log-probabilities."""
    end = policy.tokenizer.eos_token_id
    tag = {"type": "json_schema", "json_schema": {"enum": ["Up", "Down", 3]}}
    structure = join({"type": "structural_tag", "format": tag}, [end])
    for seed in range(4):
        request = replace(ask([5, 9], tokens=40, stop=frozenset([end]), seed=seed), structure=structure)
        reply = await engine.generate(request)
        assert json.loads(policy.tokenizer.decode(reply.tokens[:-1])) in ("Up", "Down", 3)
        turn = Turn(fresh=True, prompt=[5, 9], reply=reply.tokens, logprobs=reply.logprobs, structure=structure)
        scores = policy.score(*Batch([Episode(0, 0, "a", turns=[turn])]).block([0]).inputs)
        assert reply.logprobs == pytest.approx(scores.logprobs_N.tolist(), abs=ROUNDING)


def ask(prompt: list[int], *, tokens: int = 8, stop: frozenset[int] = frozenset(), seed: int = 0) -> Request:
    return Request(prompt, max_tokens=tokens, stop=stop, seed=seed)


async def hand_over(engine: Engine, version: int, model: torch.nn.Module) -> None:
    await engine.pause()
    await engine.load(version, model)
    await engine.resume()


async def begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that has come to where it waits."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


@contextmanager
def held(engine: Engine, steps: int = 5) -> Iterator[bool]:
    """Pause an engine that samples in its own thread after `steps` steps, until the block ends, and yield True.

    Otherwise it might finish a reply before the event loop looks. For engines that sample on the loop, yield False.
    """
    if not isinstance(engine, TorchEngine):
        yield False
        return
    step, released, taken = engine._batcher.step, threading.Event(), 0

    def held_step(*arguments: Any) -> Any:
        nonlocal taken
        finished = step(*arguments)
        taken += 1
        if taken >= steps:
            released.wait()
        return finished

    engine._batcher.step = held_step  # type: ignore[method-assign]
    try:
        yield True
    finally:
        released.set()


async def reset(shared: Any, engine: Any, policy: Policy) -> None:
    """Makes an engine over a core or server that several tests share begin with the policy's weights.

    shared: begins with these weights too; what it holds is noted there.
    """
    load = engine.load

    async def noted(version: int, model: torch.nn.Module) -> None:
        shared.held = None
        await load(version, model)
        shared.held = model

    engine.load = noted
    if getattr(shared, "held", policy.model) is not policy.model:
        await hand_over(engine, 0, policy.model)


class ModelConformance:
    """Requirements that depend on the model: tokens, stop ids, log-probabilities, weights, and each token's version.

    Derive a class with the fixture `engine` (made of the fixture `policy`, at most MAX_CONTEXT tokens).

    scale: factor that changes weights so that the change is visible.
    """

    tolerance = ROUNDING
    scale = 0.3

    def close_to(self, reply: Reply, model: torch.nn.Module, prompt: list[int], temperature: float = 1.0) -> None:
        wanted = logprobs_under(model, prompt, reply.tokens, temperature)
        assert reply.logprobs == pytest.approx(wanted, abs=self.tolerance)

    async def test_a_reply_is_what_the_weights_say(self, engine: Engine, policy: Policy) -> None:
        prompt = [5, 9, 2, 7]
        reply = await engine.generate(ask(prompt, tokens=12))
        assert len(reply.tokens) == len(reply.logprobs) == len(reply.versions) == 12
        assert reply.finish == "length"
        self.close_to(reply, policy.model, prompt)

    async def test_a_stop_token_ends_a_reply_and_is_part_of_it(self, engine: Engine) -> None:
        """This also holds for a stop token at the length limit."""
        free = await engine.generate(ask([5, 9, 2, 7], tokens=10))
        stop = free.tokens[3]
        expected = free.tokens[: free.tokens.index(stop) + 1]
        for limit in (10, len(expected)):
            reply = await engine.generate(ask([5, 9, 2, 7], tokens=limit, stop=frozenset({stop})))
            assert (reply.tokens, reply.finish) == (expected, "stop")

    async def test_a_conversation_is_exact_over_its_turns(self, engine: Engine, policy: Policy) -> None:
        context = [5, 9, 2]
        for turn in range(4):
            reply = await engine.generate(replace(ask(context, tokens=4, seed=turn), conversation="talk"))
            self.close_to(reply, policy.model, context)
            context = [*context, *reply.tokens, 4, 6]
        for context in ([5, 9, 2, 8, 8], [5, 9, 3], [7], [5, 9, 2, 8, 8, 1]):  # it may change its past
            reply = await engine.generate(replace(ask(context), conversation="talk"))
            self.close_to(reply, policy.model, context)
        engine.forget("talk")
        engine.forget("talk")

    async def test_new_weights_are_used_after_a_load(self, engine: Engine, policy: Policy) -> None:
        prompt, other = [5, 9, 2, 7], changed(policy, scale=self.scale)
        request = replace(ask(prompt), conversation="talk")
        await engine.generate(request)
        await hand_over(engine, 3, other)
        reply = await engine.generate(request)
        self.close_to(reply, other, prompt)
        assert set(reply.versions) == {3}

    async def test_a_reply_over_a_load_says_which_weights_sampled_what(self, engine: Engine, policy: Policy) -> None:
        """The reply is interrupted in the middle, however fast engine and machine are, and continues."""
        models = [policy.model, changed(policy, scale=self.scale)]
        prompts, delay, cut = [[5, 9, 2 + index] for index in range(4)], 0.02, 0
        for version in range(1, 20):
            old, new = (models[(version + age) % 2] for age in (1, 0))
            before = engine.stats().sampled
            calls = [asyncio.ensure_future(engine.generate(ask(prompt, tokens=50))) for prompt in prompts]
            with held(engine) as in_a_step:
                await eventually(lambda: engine.stats().running)
                await asyncio.sleep(delay)
                pausing = await begun(engine.pause())
                assert not (in_a_step and pausing.done()), "a token is still being sampled"
            await pausing
            await engine.load(version, new)
            await engine.resume()
            replies = await asyncio.gather(*calls)
            for prompt, reply in zip(prompts, replies, strict=True):
                assert len(reply.tokens) == len(reply.versions) == len(reply.logprobs) == 50
                assert reply.versions == sorted(reply.versions) and set(reply.versions) <= {version - 1, version}
                sampled = reply.versions.count(version - 1)
                wanted = logprobs_under(old, prompt, reply.tokens, 1.0)[:sampled]
                wanted += logprobs_under(new, prompt, reply.tokens, 1.0)[sampled:]
                assert reply.logprobs == pytest.approx(wanted, abs=self.tolerance)
                cut += 0 < sampled < 50
            assert engine.stats().sampled == before + 4 * 50
            if cut:
                return
            delay *= 0.5 if version - 1 in replies[0].versions else 2
        pytest.fail("every pause came before the first token or after the last one")


class EngineConformance(ModelConformance):
    """All requirements for an engine. Derive a class with the fixture `engine`, as for `ModelConformance`."""

    async def cores(self) -> list[int]:
        """Return the ids of processes that sample. They are stopped while a pause is on its way to them."""
        return []

    # --- one reply ---------------------------------------------------------------------------------------------------

    async def test_log_probabilities_are_at_the_temperature(self, engine: Engine, policy: Policy) -> None:
        prompt = [5, 9, 2, 7]
        reply = await engine.generate(replace(ask(prompt), temperature=0.5))
        self.close_to(reply, policy.model, prompt, 0.5)

    async def test_temperature_zero_is_greedy(self, engine: Engine, policy: Policy) -> None:
        prompt = [5, 9, 2]
        reply = await engine.generate(replace(ask(prompt), temperature=0.0))
        for place, token in enumerate(reply.tokens):
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([[*prompt, *reply.tokens[:place]]])).logits[0, -1]
            assert float(logits[token]) == pytest.approx(float(logits.max()), abs=self.tolerance)

    async def test_a_context_is_never_longer_than_the_limit(self, engine: Engine) -> None:
        prompt = [3] * (MAX_CONTEXT - 5)
        reply = await engine.generate(ask(prompt, tokens=50))
        assert (len(reply.tokens), reply.finish) == (5, "length")

    async def test_a_prompt_that_cannot_be_served_is_refused(self, engine: Engine, policy: Policy) -> None:
        refused = {"empty": [[]], "not among the model's": [[5, -1], [5, 10**6]]}
        refused["leaves no room"] = [[3] * MAX_CONTEXT, [3] * (MAX_CONTEXT + 3)]
        for words, prompts in refused.items():
            for prompt in prompts:
                with pytest.raises(ValueError, match=words):
                    await engine.generate(ask(prompt))
        self.close_to(await engine.generate(ask([5, 9])), policy.model, [5, 9])

    async def test_tokens_are_given_while_the_rest_is_sampled(self, engine: Engine) -> None:
        """A pause in between changes nothing; the reply may have tokens that were not given.

        A fast server may have sampled all of them before the pause reaches it, so that another reply is tried.
        """
        cores = await self.cores()
        for last in range(20):
            streamed: list[int] = []
            pauses: list[asyncio.Task[None]] = []

            def take(start: int, tokens: list[int], given: list[int] = streamed, tasks: Any = pauses) -> None:
                assert start == len(given)
                given.extend(tokens)
                if not tasks:
                    for core in cores:
                        os.kill(core, signal.SIGSTOP)
                    tasks.append(asyncio.create_task(engine.pause()))

            request = replace(ask([5, 9, 2, last], tokens=50), on_tokens=take)
            call = asyncio.ensure_future(engine.generate(request))
            try:
                with held(engine):
                    await eventually(lambda tasks=pauses: tasks)
                    await asyncio.sleep(0.2 if cores else 0)
            finally:
                for core in cores:
                    os.kill(core, signal.SIGCONT)
            await pauses[0]
            before = [] if call.done() else list(streamed)
            await engine.resume()
            reply = await call
            assert reply.tokens[: len(streamed)] == streamed and len(reply.tokens) == 50
            if 0 < len(before) < len(streamed):
                break
        else:
            pytest.fail("every reply was complete before the pause")
        assert (await engine.generate(replace(request, on_tokens=None))).tokens[: len(before)] == before

    # --- many --------------------------------------------------------------------------------------------------------

    async def test_company_does_not_change_a_reply(self, engine: Engine) -> None:
        requests = [ask([5, 9, 2 + index], tokens=3 + index, seed=index) for index in range(12)]
        alone = [await engine.generate(request) for request in requests]
        together = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]

    async def test_seeds_matter(self, engine: Engine) -> None:
        replies = await asyncio.gather(*(engine.generate(ask([5, 9, 2, 7], seed=seed)) for seed in range(6)))
        assert len({tuple(reply.tokens) for reply in replies}) > 1

    # --- weights -----------------------------------------------------------------------------------------------------

    async def test_nothing_is_sampled_during_a_pause(self, engine: Engine) -> None:
        await engine.pause()
        before = engine.stats().sampled
        call = asyncio.ensure_future(engine.generate(ask([5, 9])))
        await asyncio.sleep(0.02)
        assert not call.done()
        assert engine.stats().sampled == before
        await engine.resume()
        assert len((await call).tokens) == 8

    async def test_a_load_outside_of_a_pause_is_refused(self, engine: Engine, policy: Policy) -> None:
        with pytest.raises(RuntimeError, match="pause"):
            await engine.load(1, policy.model)

    async def test_a_pause_without_a_load_changes_no_distribution(self, engine: Engine, policy: Policy) -> None:
        prompt = [5, 9, 2]
        call = asyncio.ensure_future(engine.generate(ask(prompt, tokens=40)))
        for _ in range(3):
            await asyncio.sleep(0.005)
            await engine.pause()
            await engine.resume()
        reply = await call
        assert len(reply.tokens) == 40
        self.close_to(reply, policy.model, prompt)

    # --- ends --------------------------------------------------------------------------------------------------------

    async def test_a_cancelled_call_leaves_the_others_alone(self, engine: Engine, policy: Policy) -> None:
        calls = [asyncio.ensure_future(engine.generate(ask([5, index], tokens=30))) for index in range(4)]
        with held(engine):
            await eventually(lambda: engine.stats().running)
            calls[1].cancel()
            await asyncio.sleep(0)  # the engine learns of it when the call is thrown out of its wait
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        for index in (0, 2, 3):
            reply = results[index]
            assert isinstance(reply, Reply)
            self.close_to(reply, policy.model, [5, index])
        await eventually(lambda: not engine.stats().running)
        assert engine.stats().sampled < 4 * 30

    async def test_closing_fails_calls_in_flight_and_later_ones(self, engine: Engine) -> None:
        calls = [asyncio.ensure_future(engine.generate(ask([5, index], tokens=60))) for index in range(3)]
        with held(engine):
            await eventually(lambda: engine.stats().running)
            closing = await begun(engine.close())
        await closing
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, RuntimeError) for result in results), results
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(ask([5, 9]))
        await engine.close()

    async def test_counters_add_up(self, engine: Engine) -> None:
        replies = await asyncio.gather(*(engine.generate(ask([5, 9, index], tokens=4)) for index in range(3)))
        stats = engine.stats()
        assert stats.requests == 3
        assert stats.sampled == sum(len(reply.tokens) for reply in replies) == 12
        assert stats.prefilled + stats.reused == 9
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.seconds > 0
