"""Of several replies to an observation the one is played that a scorer prefers."""

from collections.abc import Iterator, Sequence

import pytest
from pydantic import ValidationError

from starpod.client import Fleet
from starpod.trainer.agents.best_of import BestOfAgents
from starpod.trainer.agents.engine import EngineAgents, SamplingConfig
from starpod.trainer.config import Config
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.base import Request
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.environment import EnvironmentConfig
from tests.support import ServerProcess, start_server
from tests.trainer.scripted_engine import ScriptedEngine

ACTIONS = ("Left", "Down", "Right", "Up")
LAKE = EnvironmentConfig(
    id="frozen_lake-v1",
    options={"observation": "local", "success_rate": 1.0, "map": ["SF", "FG"]},
    max_turns=4,
    max_actions_per_turn=1,
)
TEMPLATE = Template(train_tokenizer(["P 0 0 G 2 2 Down Right # _ Left Up <answer> Down </answer>"], size=400))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("frozen_lake-v1") as process:
        yield process


async def play(server: ServerProcess, count: int, wanted: Sequence[str]) -> tuple[Episode, ScriptedEngine]:
    """The policy says another action for each seed; the scorer likes what is wanted in this turn."""
    said: dict[int, str] = {}

    def say(request: Request, text: str) -> str:
        action = said.setdefault(request.seed, ACTIONS[len(said) % 4])
        return f"<answer>{action}</answer>"

    async def score(episodes: Sequence[Episode]) -> list[list[float]]:
        assert len(episodes) == count
        assert len({tuple(map(id, each.turns[:-1])) for each in episodes}) == 1, "they share what was played"
        likes = wanted[len(episodes[0].turns) - 1]
        return [
            [0.0] * (len(each.turns) - 1) + [float(likes in TEMPLATE.decode(each.turns[-1].reply))] for each in episodes
        ]

    engine = ScriptedEngine(TEMPLATE, say)
    plain = EngineAgents(
        engine=engine,
        template=TEMPLATE,
        prompt=PromptConfig(style="compact", thinking=False),
        sampling=SamplingConfig(max_reply_tokens=16),
    )
    agents = BestOfAgents.like(plain, count=count, score=score)
    async with Fleet(server.address) as fleet:
        collected = await Collector(fleet=fleet, agents=agents, task=LAKE.task(ACTIONS)).collect([Start(0, 1)], 1)
    assert collected.failed == 0
    return collected.groups[0].episodes[0], engine


async def test_the_reply_that_scores_highest_is_played(server: ServerProcess) -> None:
    episode, engine = await play(server, 4, ["Right", "Down"])
    assert [turn.actions for turn in episode.turns] == [["Right"], ["Down"]]
    assert episode.success
    assert len(engine.requests) == 8
    assert len({request.seed for request in engine.requests}) == 8
    second = episode.turns[1]
    assert not second.fresh
    assert engine.requests[4].prompt == [*episode.turns[0].prompt, *episode.turns[0].reply, *second.prompt]


async def test_where_none_is_better_the_first_one_is_played(server: ServerProcess) -> None:
    episode, engine = await play(server, 2, ["nothing"] * 4)
    assert episode.turns[0].reply == TEMPLATE.encode_reply("<answer>Left</answer>")
    assert engine.requests[0].seed == (await play(server, 1, ["nothing"] * 4))[1].requests[0].seed


@pytest.mark.parametrize(
    ("values", "words"),
    [({}, "set scorer.kind to q"), ({"scorer": "q", "script": "attempts"}, "is for one agent")],
)
def test_it_is_refused_where_replies_have_no_values(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Config.model_validate({"evaluation": {"best_of": 4}, **values})
