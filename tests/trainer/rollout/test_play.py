"""One episode of an agent: its end, what is sent, and what a failure leaves."""

import ast
from itertools import chain

from starpod.client import Fleet, Limits, Observation, Want
from starpod.trainer.agents.base import Agent, AgentError, Move, Stop, Task
from starpod.trainer.data.episode import Episode
from starpod.trainer.rollout.play import play
from tests.support import ROOT

LAKE = Task("frozen_lake-v1", options={"success_rate": 1.0}, limits=Limits(max_turns=3))


class Scripted(Agent):
    """Makes the moves of a list, then stops."""

    def __init__(self, *moves: Move | Exception) -> None:
        self.moves = iter(moves)
        self.closed = 0

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        move = next(self.moves, Stop())
        if isinstance(move, Exception):
            raise move
        return move

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        return [7, 8], True

    def close(self) -> None:
        self.closed += 1


async def played(fleet: Fleet, *moves: Move | Exception) -> tuple[Episode, int]:
    """The episode, and the steps that the environment was asked for."""
    watched: list[Episode] = []
    agent = Scripted(*moves)
    (session,) = await LAKE.open(fleet, 1, 1, Want())
    episode = await play(agent, session, group=5, watch=watched.append)
    await session.close()
    assert (agent.closed, watched, episode.group) == (1, [episode], 5)
    return episode, session.step_index


async def test_an_agent_that_has_no_further_move_ends_its_episode(fleet: Fleet) -> None:
    episode, steps = await played(fleet, Move("Left", ["Left"]))
    assert (len(episode.turns), steps, episode.end, episode.success, episode.tail) == (1, 1, "", None, [])
    assert episode.final_observation


async def test_a_turn_without_an_action_is_sent_or_counts_here_alone(fleet: Fleet) -> None:
    sent, steps = await played(fleet, *[Move("nothing", [])] * 9)
    assert (len(sent.turns), steps, sent.end, sent.success) == (3, 3, "max_turns", False)
    kept, steps = await played(fleet, *[Move("nothing", None)] * 9)
    assert (len(kept.turns), steps, kept.end, kept.success) == (3, 0, "max_turns", False)
    # What would have come next is kept for a critic.
    assert (kept.tail, kept.tail_fresh) == ([7, 8], True)


async def test_an_agent_that_fails_loses_its_episode_and_keeps_its_turns(fleet: Fleet) -> None:
    episode, _ = await played(fleet, Move("Left", ["Left"]), AgentError("no reply"))
    assert (episode.failed, episode.error, len(episode.turns), episode.tail) == (True, "AgentError: no reply", 1, [])


def test_no_other_place_of_the_trainer_and_the_site_steps_a_session() -> None:
    folders = [ROOT / "trainer", ROOT / "tools" / "starpod" / "ui"]
    stepping = {
        path.relative_to(ROOT).as_posix()
        for path in chain.from_iterable(folder.rglob("*.py") for folder in folders)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Await)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr.startswith("step")
    }
    assert stepping == {"trainer/starpod/trainer/rollout/play.py"}
