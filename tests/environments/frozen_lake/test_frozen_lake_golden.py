"""FrozenLake against recorded episodes of the original."""

from __future__ import annotations

from typing import Any

import pytest

from starpod.env_server.episode import Episode, EpisodeOver, Limits, Want
from starpod.environments.frozen_lake import FrozenLake
from tests.environments.recorded_turns import begin, records_of, replay_turns
from tests.golden import Draws, Parity, golden

CHOSEN = {
    "open-success-unknown": "the original says success=false while all is open; ours says nothing until it is over",
    "invalid-is-an-outcome": "the original raises on an unknown action; ours answers valid=false and changes nothing",
    "over-is-over": "the original steps on after the end; ours refuses until the next reset",
    "no-draw-without-slip": "the original draws a number even where nothing can slip; ours does not",
}


def _options(config: dict[str, Any], desc: list[str]) -> FrozenLake.Options:
    return FrozenLake.Options(
        map=desc,
        success_rate=config["success_rate"] if config["is_slippery"] else 1.0,
        observation=config["observation_format"],
    )


def test_golden_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    extra = [record for record in golden("episodes_extra") if record["env_type"] == "frozen_lake"]
    for record in golden("episodes_FrozenLake") + golden("episodes_CoordFrozenLake") + extra:
        parity.episodes += 1
        environment = FrozenLake()
        environment.options = _options(record["config"], record["reset"]["desc"])
        episode = Episode(environment, Limits())
        episode.reset(0, 0)
        parity.equal(record["id"], environment.observe(), record["reset"]["obs"])
        parity.equal(record["id"], environment.position, record["reset"]["start_state"])
        for number, step in enumerate(record["steps"]):
            parity.steps += 1
            what = f"{record['id']} step {number}"
            assert environment.position == step["state_before"], what
            draws = environment._dynamics = Draws(step["rng_uniforms"])
            action = step["action_name"] if step["action_name"] is not None else step["action"]
            if "exception" in step and action in environment.spec.actions:
                # The original knows actions by number: a name, which is right for us, is wrong for it.
                action = "not an action"
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
                parity.equal(what, transition.observation.parts, step["render_after"])
                parity.deviate("invalid-is-an-outcome")
                continue
            parity.equal(what, draws.left, [], "" if environment.options.success_rate < 1 else "no-draw-without-slip")
            parity.equal(what, environment.position, step["state_after"])
            parity.equal(what, transition.observation.parts, step["obs"])
            parity.equal(what, transition.reward, step["reward"])
            parity.equal(what, transition.terminated, step["done"])
            unknown = "open-success-unknown" if transition.success is None and not step["done"] else ""
            parity.equal(what, transition.success, step["info"]["success"], unknown)
            parity.equal(what, outcome.effective, step["info"]["action_is_effective"])
            parity.equal(what, outcome.valid, step["info"]["action_is_valid"])
    parity.report("frozen_lake-v1", capsys)


def test_golden_turns(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity({})
    for record in records_of("FrozenLake"):
        environment = FrozenLake()
        shown = "grid_coord" if "Coord" in record["variant"] else "grid"
        environment.options = FrozenLake.Options(map=record["layout"]["desc"], observation=shown)
        replay_turns(record, begin(environment, record), parity)
    parity.report("frozen_lake-v1 in turns", capsys)
