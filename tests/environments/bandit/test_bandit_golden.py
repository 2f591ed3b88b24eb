"""Bandit against recorded episodes of the original."""

from __future__ import annotations

from typing import Any

import pytest

from starpod.env_server.episode import Episode, EpisodeOver, Limits, Want
from starpod.environments.bandit import Bandit
from tests.environments.recorded_turns import begin, records_of, replay_turns
from tests.golden import Draws, Parity, golden

CHOSEN = {
    "short-first-observation": "the original shows its whole prompt; ours names the arms, instructions() explains",
    "invalid-is-an-outcome": "the original raises on an unknown arm; ours answers valid=false and changes nothing",
    "over-is-over": "the original pulls again after its one pull; ours refuses until the next reset",
}


def _options(config: dict[str, Any]) -> Bandit.Options:
    return Bandit.Options(
        split=config["split"],
        low_reward=config["lo_arm_score"],
        high_reward=config["hi_arm_hiscore"],
        high_loss=config["hi_arm_loscore"],
        high_probability=config["hi_arm_hiscore_prob"],
    )


def test_golden_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    extra = [record for record in golden("episodes_extra") if record["env_type"] == "bandit"]
    for record in golden("episodes_Bandit") + golden("episodes_BanditTest") + extra:
        parity.episodes += 1
        environment = Bandit()
        environment.options = _options(record["config"])
        episode = Episode(environment, Limits())
        episode.reset(0, 0)
        start = record["reset"]
        environment.reset(Draws(start["rng_uniforms"]))  # pair and order come out of the recorded draws
        assert environment.arms == tuple(start["action_lookup"].values())
        assert environment.high == start["hi_arm"]
        parity.equal(record["id"], environment.observe(), start["obs"], "short-first-observation")
        for number, step in enumerate(record["steps"]):
            parity.steps += 1
            what = f"{record['id']} step {number}"
            environment._dynamics = Draws(step.get("rng_uniforms", []))
            action = step["action_name"] if step["action_name"] is not None else step["action"]
            before = environment.observe()
            try:
                transition = episode.turn([action], Want())
            except EpisodeOver:
                parity.deviate("over-is-over")
                continue
            outcome = transition.outcomes[0]
            assert outcome is not None
            if "exception" in step:
                assert not outcome.valid
                assert not outcome.effective
                assert not transition.terminated
                assert transition.observation.parts == before
                parity.deviate("invalid-is-an-outcome")
                continue
            assert environment._dynamics.left == [], what
            parity.equal(what, transition.observation.parts, step["obs"])
            parity.equal(what, transition.reward, step["reward"])
            parity.equal(what, transition.terminated, step["done"])
            parity.equal(what, transition.success, step["info"]["success"])
            parity.equal(what, outcome.effective, step["info"]["action_is_effective"])
            parity.equal(what, outcome.valid, step["info"]["action_is_valid"])
    parity.report("bandit-v1", capsys)


def test_golden_turns(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity({"short-first-observation": CHOSEN["short-first-observation"]})
    for record in records_of("Bandit"):
        layout = record["layout"]
        environment = Bandit()
        environment.options = Bandit.Options(pair=(layout["lo_arm"], layout["hi_arm"]))
        episode = begin(environment, record)
        environment.arms = tuple(layout["action_lookup"].values())
        replay_turns(
            record, episode, parity, lambda transition: "" if transition.terminated else "short-first-observation"
        )
    parity.report("bandit-v1 in turns", capsys)
