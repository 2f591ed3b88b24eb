"""An agent that samples several replies to an observation, and plays the best one by a scorer."""

from collections.abc import Sequence

import pytest

from starpod.client import Fleet
from starpod.trainer.agents.best_of import BestOfAgents
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.base import Request
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.environment import make_task
from tests.trainer.lake import ACTIONS, LAKE, TEMPLATE, collector
from tests.trainer.scripted_engine import ScriptedEngine

PLAIN = Template(TEMPLATE.tokenizer)
SMALL = LAKE.with_options({"map": ["SF", "FG"]}).model_copy(update={"max_turns": 4, "max_actions_per_turn": 1})


async def play(fleet: Fleet, count: int, wanted: Sequence[str]) -> tuple[Episode, ScriptedEngine]:
    """The policy says another action for each seed; the scorer likes what is wanted in this turn."""
    said: dict[int, str] = {}

    def say(request: Request, text: str) -> str:
        return f"<answer>{said.setdefault(request.seed, ACTIONS[len(said) % 4])}</answer>"

    async def score(episodes: Sequence[Episode]) -> list[list[float]]:
        assert len(episodes) == count
        assert len({tuple(map(id, each.turns[:-1])) for each in episodes}) == 1, "they share what was played"
        likes = wanted[len(episodes[0].turns) - 1]
        return [
            [0.0] * (len(each.turns) - 1) + [float(likes in PLAIN.decode(each.turns[-1].reply))] for each in episodes
        ]

    engine = ScriptedEngine(PLAIN, say)
    plain = collector(fleet, engine, prompt=PromptConfig(style="compact", thinking=False)).agents
    agents = BestOfAgents.from_agents(plain, count=count, score=score)
    collected = await Collector(fleet=fleet, agents=agents, task=make_task(SMALL, ACTIONS)).collect([Start(0, 1)], 1)
    assert collected.failed == 0
    return collected.groups[0].episodes[0], engine


async def test_the_reply_that_scores_highest_is_played(fleet: Fleet) -> None:
    episode, engine = await play(fleet, 4, ["Right", "Down"])
    assert [turn.actions for turn in episode.turns] == [["Right"], ["Down"]]
    assert episode.success
    assert len(engine.requests) == len({request.seed for request in engine.requests}) == 8
    first, second = episode.turns
    assert not second.fresh
    assert engine.requests[4].prompt == [*first.prompt, *first.reply, *second.prompt]


async def test_where_none_is_better_the_first_one_is_played(fleet: Fleet) -> None:
    episode, engine = await play(fleet, 2, ["nothing"] * 4)
    assert episode.turns[0].reply == PLAIN.encode_reply("<answer>Left</answer>")
    assert engine.requests[0].seed == (await play(fleet, 1, ["nothing"] * 4))[1].requests[0].seed


@pytest.mark.parametrize(
    ("values", "words"),
    [({}, "set scorer.kind to q"), ({"scorer": "q", "script": "attempts"}, "is for one agent")],
)
def test_it_is_refused_where_replies_have_no_values(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"evaluation": {"best_of": 4}, **values})
