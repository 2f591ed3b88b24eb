"""Episodes over the wire: what is recorded is what was sampled and what the environment said."""

import asyncio
from typing import Any

import pytest

from starpod.client import Fleet
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.prompts.prompt import Context, PromptConfig
from starpod.trainer.rollout.collect import Start
from tests.client.test_fleet import give_patience
from tests.support import start_server
from tests.trainer.lake import LAKE, SAMPLING, TEMPLATE, collect, collect_one, collector, reply
from tests.trainer.scripted_engine import ScriptedEngine


async def test_a_solved_episode(fleet: Fleet) -> None:
    (group,), engine = await collect(fleet, reply("Down", "Right"), Start(7, 1), size=2)
    assert [(episode.group, episode.member) for episode in group] == [(7, 0), (7, 1)]
    for episode in group:
        assert (episode.end, episode.success, episode.total_reward) == ("terminal", True, 1.0)
        assert [turn.actions for turn in episode.turns] == [["Down", "Right"], ["Down", "Right"]]
        assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
        assert [(turn.executed, turn.valid, turn.effective) for turn in episode.turns] == [(2, 2, 2)] * 2
        assert [turn.observation[:11] for turn in episode.turns] == ["P 0 0 G 2 2", "P 1 1 G 2 2"]
        (sample,) = samples_of(episode)
        # What the model saw for its last reply, and that reply, is what is trained.
        request = next(r for r in reversed(engine.requests) if r.conversation == f"train/7/{episode.member}")
        assert sample.tokens == request.prompt + episode.turns[-1].reply
    assert sorted(engine.forgotten) == ["train/7/0", "train/7/1"]
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


async def test_an_ill_formed_reply_costs_a_turn_and_is_reported(fleet: Fleet) -> None:
    def say(request: Request, context: str) -> str:
        return reply("Down", "Right") if "Invalid" in context else "<think>nothing"

    episode, _ = await collect_one(fleet, say)
    first, second, third = episode.turns
    assert (first.well_formed, first.actions, first.reward, first.parts["format"]) == (False, [], -0.1, -0.1)
    assert second.observation == first.observation
    assert (second.reward, third.reward, episode.success) == (0.0, 1.0, True)


async def test_an_unknown_action_is_an_outcome(fleet: Fleet) -> None:
    episode, _ = await collect_one(fleet, reply("Jump", "Down"))
    turn = episode.turns[0]
    assert (turn.actions, turn.well_formed, turn.parts["format"]) == (["Jump", "Down"], False, -0.1)
    assert turn.valid < len(turn.actions)


NO_ACTION, STAY = "<think>never an answer", reply("Left", "Up")
TIGHT = {"min_reply_tokens": 40, "max_episode_tokens": 100}


@pytest.mark.parametrize(
    ("said", "max_turns", "sampling", "context", "end"),
    [
        (NO_ACTION, 6, {}, "full", "max_turns"),
        (STAY, 6, {}, "full", "max_actions"),
        (STAY, 6, {"max_episode_tokens": 70}, "full", "context"),
        # A reply has room or is not asked for: a window gives up past turns for it, a whole conversation ends.
        (STAY, 6, TIGHT, "full", "context"),
        (STAY, 6, TIGHT, "window", "max_actions"),
        (reply("Down", "Right"), 2, {}, "full", "terminal"),  # the last turn may solve it
    ],
)
async def test_ends(
    fleet: Fleet, said: str, max_turns: int, sampling: dict[str, int], context: Context, end: str
) -> None:
    episode, engine = await collect_one(
        fleet,
        said,
        environment=LAKE.model_copy(update={"max_turns": max_turns}),
        sampling=(limits := SAMPLING.model_copy(update=sampling)),
        prompt=PromptConfig(style="compact", context=context),
    )
    assert (episode.end, bool(episode.success)) == (end, end == "terminal")
    assert (len(episode.turns) == max_turns) == (end in ("max_turns", "terminal"))
    assert (sum(turn.executed for turn in episode.turns) == 8) == (end == "max_actions")
    assert bool(episode.tail) == (end != "terminal") or end == "context"
    for request in engine.requests:
        assert request.max_tokens >= (limits.min_reply_tokens or 1)
        assert len(request.prompt) + request.max_tokens <= limits.max_episode_tokens


async def test_a_reply_that_is_cut_is_closed_untrained(fleet: Fleet) -> None:
    sampling = SAMPLING.model_copy(update={"max_reply_tokens": 4, "max_episode_tokens": 300})
    episode, _ = await collect_one(fleet, STAY, sampling=sampling)
    first, second = episode.turns[:2]
    assert (first.finish, len(first.reply), second.prompt[0]) == ("length", 4, TEMPLATE.end)
    assert Batch([episode]).mask_BT.sum() == 4 * len(episode.turns)


@pytest.mark.parametrize("context", ["window", "single_turn"])
async def test_windows_begin_a_sample_each_turn(fleet: Fleet, context: Context) -> None:
    prompt = PromptConfig.model_validate({"style": "compact", "context": {"kind": context, "window": 2}})
    episode, engine = await collect_one(fleet, reply("Left"), prompt=prompt)
    assert all(turn.fresh for turn in episode.turns) and episode.tail_fresh
    for sample, request, turn in zip(samples_of(episode), engine.requests, episode.turns, strict=True):
        assert (sample.tokens, sum(sample.sampled)) == (request.prompt + turn.reply, len(turn.reply))


async def test_an_error_that_ends_the_run_leaves_no_member_in_play(fleet: Fleet) -> None:
    waits = asyncio.Event()

    class Broken(ScriptedEngine):
        async def generate(self, request: Request) -> Reply:
            if request.conversation == "train/0/0":
                await waits.wait()
                raise RuntimeError("the engine is gone")
            waits.set()
            await asyncio.Event().wait()
            raise AssertionError

    engine = Broken(TEMPLATE, "")
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await collector(fleet, engine).play_group(Start(0, 1), 2)
    assert sorted(engine.forgotten) == ["train/0/0", "train/0/1"]


async def test_groups_come_back_in_order_whatever_finishes_first(fleet: Fleet) -> None:
    def say(request: Request, context: str) -> str:
        return reply("Down", "Right") if "train/0" in request.conversation else reply("Left")

    groups, _ = await collect(fleet, say, Start(1, 5), Start(0, 6), Start(2, 5), size=2)
    assert [[(episode.group, episode.seed) for episode in group] for group in groups] == [
        [(1, 5)] * 2, [(0, 6)] * 2, [(2, 5)] * 2
    ]  # fmt: skip


async def test_an_error_of_the_engine_stops_the_collection(fleet: Fleet) -> None:
    def say(*_: Any) -> str:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(collect(fleet, say, Start(0, 1), Start(1, 2), size=4), 60)


async def test_a_lost_server_fails_episodes_not_the_run() -> None:
    """The only server dies in the middle: no reward of 0 comes of it."""
    with start_server("frozen_lake-v1") as doomed:

        def say(request: Request, context: str) -> str:
            give_patience(fleet, 1.0)
            if "train/0/1" in request.conversation and doomed.process.poll() is None:
                doomed.kill()
            return reply("Left")

        async with Fleet(doomed.address) as fleet:
            collected = await collector(fleet, ScriptedEngine(TEMPLATE, say)).collect([Start(0, 1)], 3, min_size=2)
    assert (collected.failed, collected.dropped, collected.groups) == (3, 1, [])
    assert collected.error.startswith("Unreachable: ")
