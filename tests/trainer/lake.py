"""A lake of nine cells without slips, and the words with which a scripted engine crosses it."""

from typing import Any

from starpod.client import Fleet
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import make_task
from tests.trainer.scripted_engine import Say, ScriptedEngine

ACTIONS = ("Left", "Down", "Right", "Up")
LAKE = EnvironmentConfig(
    id="frozen_lake-v1",
    options={"observation": "local", "success_rate": 1.0, "map": ["SFF", "FFF", "FFG"]},
    max_turns=6,
    max_actions_per_turn=2,
    max_actions=8,
)
TASK = make_task(LAKE, ACTIONS)
PROMPT = PromptConfig(style="compact")
SAMPLING = SamplingConfig(max_reply_tokens=64)
TEXTS = ["P 0 0 G 2 2 Down Right # _ _ # Left Up", "<think> Down </think><answer> Down || Right </answer>"]
TEMPLATE = Template(train_tokenizer(TEXTS, size=400), prefill="<think>")


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
    return Collector(fleet=fleet, agents=agents, task=make_task(environment, ACTIONS), rewards=rewards)


async def collect(
    fleet: Fleet, say: Say | str, *starts: Start, size: int = 1, **settings: Any
) -> tuple[list[list[Episode]], ScriptedEngine]:
    """The episodes of each group, and the engine that gave the replies. say: a function, or the same reply always."""
    engine = ScriptedEngine(TEMPLATE, say)
    collected = await collector(fleet, engine, **settings).collect(starts or [Start(0, 1)], size)
    assert collected.failed == 0
    return [group.episodes for group in collected.groups], engine


async def collect_one(fleet: Fleet, say: Say | str, **settings: Any) -> tuple[Episode, ScriptedEngine]:
    """The only episode of the only group."""
    ((episode,),), engine = await collect(fleet, say, **settings)
    return episode, engine
