"""MiniGrid and BabyAI as services: their own episodes, played by BabyAI's bot."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("minigrid", reason="MiniGrid is not installed: make test-hosting")

import gymnasium
import minigrid  # noqa: F401 - registers its environments
from minigrid.utils.baby_ai_bot import BabyAIBot

from starpod.client import SyncFleet
from tests.env_server.hosting.checks import check_contract, check_recovery, spec_of, words
from tests.support import ServerProcess

LEVELS = {
    "BabyAI-GoToRedBall-v0": "gymnasium-baby-ai-go-to-red-ball-v0",
    "BabyAI-OpenDoor-v0": "gymnasium-baby-ai-open-door-v0",
}
EMPTY = "gymnasium-mini-grid-empty-5x5-v0"


NAMED = "MiniGrid-Empty-5x5-v0#actions=left,right,forward,pickup,drop,toggle,done&render=png"
WORDS = words("gymnasium", *(f"minigrid:{name}" for name in (*LEVELS, NAMED)))


def shown(observation: Any) -> Any:
    """An observation of MiniGrid as JSON."""
    return {**observation, "image": observation["image"].tolist(), "direction": int(observation["direction"])}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", [3, 11])
def test_the_bot_plays_the_packages_own_episode(fleet: SyncFleet, level: str, seed: int) -> None:
    own = gymnasium.make(level, disable_env_checker=True)
    seen, _ = own.reset(seed=seed)
    bot = BabyAIBot(own.unwrapped)
    (session,) = fleet.open(LEVELS[level], seed=seed)
    assert json.loads(session.observation.text) == shown(seen)
    done = False
    while not done:
        action = int(bot.replan())
        seen, reward, done, _, _ = own.step(action)
        transition = session.step(str(action))
        assert json.loads(transition.observation.text) == shown(seen)
        assert (transition.reward, transition.terminated) == (pytest.approx(reward), done)
    assert reward > 0.5
    assert seen["mission"] in session.render()
    assert spec_of(fleet, LEVELS[level]).limits.max_turns == own.unwrapped.max_steps, "known after a reset"


def test_actions_have_names_and_there_are_pictures(fleet: SyncFleet) -> None:
    (session,) = fleet.open(EMPTY, seed=1)
    assert session.render("png").startswith(b"\x89PNG")
    for action in ("forward", "forward", "right", "forward", "forward"):
        transition = session.step(action)
    assert (transition.terminated, transition.reward > 0.9) == (True, True)


def test_they_keep_the_contract(server: ServerProcess) -> None:
    check_contract(server, LEVELS["BabyAI-GoToRedBall-v0"])


async def test_episodes_survive_a_killed_server(server: ServerProcess) -> None:
    await check_recovery(server, LEVELS["BabyAI-GoToRedBall-v0"], ["2", "1", "2"])
