"""Episodes over the wire: what is recorded is what was sampled and what the environment said."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from starpod.client import Fleet
from starpod.trainer.agents.engine import EngineAgents, SamplingConfig
from starpod.trainer.data.batch import Batch, samples_of
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.base import Request
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.prompts.prompt import Context, PromptConfig
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.environment import EnvironmentConfig
from tests.support import ServerProcess, start_server
from tests.trainer.scripted_engine import ScriptedEngine

ACTIONS = ("Left", "Down", "Right", "Up")
LAKE = EnvironmentConfig(
    id="frozen_lake-v1",
    options={"observation": "local", "success_rate": 1.0, "map": ["SFF", "FFF", "FFG"]},
    max_turns=6,
    max_actions_per_turn=2,
    max_actions=8,
)
PROMPT = PromptConfig(style="compact")
SAMPLING = SamplingConfig(max_reply_tokens=64)

Say = Callable[[Request, str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("frozen_lake-v1") as process:
        yield process


@pytest.fixture(scope="module")
def template() -> Template:
    texts = ["P 0 0 G 2 2 Down Right # _ _ # Left Up", "<think> Down </think><answer> Down || Right </answer>"]
    return Template(train_tokenizer(texts, size=400), prefill="<think>")


def reply(*actions: str) -> str:
    return f"<think>go</think><answer>{' || '.join(actions)}</answer>"


def collector(
    fleet: Fleet,
    engine: ScriptedEngine,
    environment: EnvironmentConfig = LAKE,
    prompt: PromptConfig = PROMPT,
    sampling: SamplingConfig = SAMPLING,
) -> Collector[EngineAgents]:
    agents = EngineAgents(engine=engine, template=engine.template, prompt=prompt, sampling=sampling)
    rewards = Rewards(RewardConfig())
    return Collector(fleet=fleet, agents=agents, task=environment.task(ACTIONS), rewards=rewards)


async def collect(
    address: str, template: Template, say: Say, starts: list[Start], size: int, **settings: Any
) -> tuple[list[list[Episode]], ScriptedEngine]:
    engine = ScriptedEngine(template, say)
    async with Fleet(address) as fleet:
        collected = await collector(fleet, engine, **settings).collect(starts, size)
    assert collected.failed == 0
    return [group.episodes for group in collected.groups], engine


async def test_a_solved_episode(server: ServerProcess, template: Template) -> None:
    (group,), engine = await collect(
        server.address, template, lambda request, context: reply("Down", "Right"), [Start(7, 1)], 2
    )
    assert [(episode.group, episode.member) for episode in group] == [(7, 0), (7, 1)]
    for episode in group:
        assert (episode.end, episode.success, episode.total_reward) == ("terminal", True, 1.0)
        assert [turn.actions for turn in episode.turns] == [["Down", "Right"], ["Down", "Right"]]
        assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
        assert [(turn.executed, turn.valid, turn.effective) for turn in episode.turns] == [(2, 2, 2)] * 2
        assert episode.turns[0].observation.startswith("P 0 0 G 2 2")
        assert episode.turns[1].observation.startswith("P 1 1 G 2 2")
        (sample,) = samples_of(episode)
        # What the model saw for its last reply, and that reply, is what is trained.
        request = next(r for r in reversed(engine.requests) if r.conversation == f"train/7/{episode.member}")
        assert sample.tokens == request.prompt + episode.turns[-1].reply
    assert sorted(engine.forgotten) == ["train/7/0", "train/7/1"]
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


async def test_an_ill_formed_reply_costs_a_turn_and_is_told(server: ServerProcess, template: Template) -> None:
    def say(request: Request, context: str) -> str:
        return reply("Down", "Right") if "Invalid" in context else "<think>nothing"

    ((episode,),), _ = await collect(server.address, template, say, [Start(0, 1)], 1)
    first, second, third = episode.turns
    assert (first.well_formed, first.actions, first.reward, first.parts["format"]) == (False, [], -0.1, -0.1)
    assert second.observation == first.observation
    assert (second.reward, third.reward) == (0.0, 1.0)
    assert episode.success is True


async def test_an_unknown_action_is_an_outcome(server: ServerProcess, template: Template) -> None:
    ((episode,),), _ = await collect(
        server.address, template, lambda request, context: reply("Jump", "Down"), [Start(0, 1)], 1
    )
    turn = episode.turns[0]
    assert (turn.actions, turn.well_formed, turn.parts["format"]) == (["Jump", "Down"], False, -0.1)
    assert turn.valid < len(turn.actions)


async def test_the_last_turn_may_solve_it(server: ServerProcess, template: Template) -> None:
    lake = LAKE.model_copy(update={"max_turns": 2})
    ((episode,),), _ = await collect(
        server.address, template, lambda request, context: reply("Down", "Right"), [Start(0, 1)], 1, environment=lake
    )
    assert (episode.end, episode.terminated, episode.success, episode.tail) == ("terminal", True, True, [])


async def test_limits_end_an_episode(server: ServerProcess, template: Template) -> None:
    ((turns,),), _ = await collect(
        server.address, template, lambda request, context: "<think>never an answer", [Start(0, 1)], 1
    )
    assert (turns.end, len(turns.turns), turns.success) == ("max_turns", 6, False)
    assert turns.tail
    ((actions,),), _ = await collect(
        server.address, template, lambda request, context: reply("Left", "Up"), [Start(0, 1)], 1
    )
    assert (actions.end, sum(turn.executed for turn in actions.turns)) == ("max_actions", 8)
    assert actions.tail
    sampling = SamplingConfig(max_reply_tokens=64, max_episode_tokens=70)
    ((context,),), engine = await collect(
        server.address, template, lambda request, context: reply("Left", "Up"), [Start(0, 1)], 1, sampling=sampling
    )
    assert context.end == "context"
    assert all(len(request.prompt) + request.max_tokens <= 70 for request in engine.requests)


@pytest.mark.parametrize(("context", "end"), [("full", "context"), ("window", "max_actions")])
async def test_a_reply_has_room_or_is_not_asked_for(
    server: ServerProcess, template: Template, context: Context, end: str
) -> None:
    """A window gives up past turns for it, a whole conversation ends."""
    sampling = SamplingConfig(max_reply_tokens=64, min_reply_tokens=40, max_episode_tokens=100)
    ((episode,),), engine = await collect(
        server.address,
        template,
        lambda request, text: reply("Left", "Up"),
        [Start(0, 1)],
        1,
        sampling=sampling,
        prompt=PromptConfig(style="compact", context=context),
    )
    assert episode.end == end
    assert all(request.max_tokens >= 40 for request in engine.requests)
    assert all(len(request.prompt) + request.max_tokens <= 100 for request in engine.requests)


async def test_a_reply_that_is_cut_is_closed_untrained(server: ServerProcess, template: Template) -> None:
    sampling = SamplingConfig(max_reply_tokens=4, max_episode_tokens=300)
    ((episode,),), _ = await collect(
        server.address, template, lambda request, context: reply("Left", "Up"), [Start(0, 1)], 1, sampling=sampling
    )
    first, second = episode.turns[:2]
    assert (first.finish, len(first.reply)) == ("length", 4)
    assert second.prompt[0] == template.end
    batch = Batch([episode])
    assert batch.mask_BT.sum() == 4 * len(episode.turns)


@pytest.mark.parametrize("context", ["window", "single_turn"])
async def test_windows_begin_a_sample_each_turn(server: ServerProcess, template: Template, context: str) -> None:
    prompt = PromptConfig(style="compact", context=context, window=2)  # type: ignore[arg-type]
    ((episode,),), engine = await collect(
        server.address, template, lambda request, text: reply("Left"), [Start(0, 1)], 1, prompt=prompt
    )
    assert all(turn.fresh for turn in episode.turns)
    samples = samples_of(episode)
    assert len(samples) == len(episode.turns)
    assert episode.tail_fresh
    for sample, request, turn in zip(samples, engine.requests, episode.turns, strict=True):
        assert sample.tokens == request.prompt + turn.reply
        assert sum(sample.sampled) == len(turn.reply)


async def test_groups_come_back_in_order_whatever_finishes_first(server: ServerProcess, template: Template) -> None:
    def say(request: Request, context: str) -> str:
        return reply("Down", "Right") if "train/0" in request.conversation else reply("Left")

    groups, _ = await collect(server.address, template, say, [Start(1, 5), Start(0, 6), Start(2, 5)], 2)
    assert [[episode.group for episode in group] for group in groups] == [[1, 1], [0, 0], [2, 2]]
    assert [group[0].seed for group in groups] == [5, 6, 5]


async def test_an_error_of_the_engine_stops_the_collection(server: ServerProcess, template: Template) -> None:
    def say(request: Request, context: str) -> str:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(collect(server.address, template, say, [Start(0, 1), Start(1, 2)], 4), 60)


async def test_a_lost_server_fails_episodes_not_the_run(template: Template) -> None:
    """The only server dies in the middle: no reward of 0 comes of it."""
    with start_server("frozen_lake-v1") as doomed:

        def say(request: Request, context: str) -> str:
            if "train/0/1" in request.conversation and doomed.process.poll() is None:
                doomed.kill()
            return reply("Left")

        engine = ScriptedEngine(template, say)
        async with Fleet(doomed.address, patience=6.0, timeout=1.0) as fleet:
            collected = await collector(fleet, engine).collect([Start(0, 1)], 3, min_size=2)
    assert (collected.failed, collected.dropped, collected.groups) == (3, 1, [])
    assert collected.error.startswith("Unreachable: ")
