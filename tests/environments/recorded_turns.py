"""Turns of several actions under limits, as the original's manager played them, against an episode of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starpod.env_server.environment import UNKNOWN_NAME, Environment, Limits
from starpod.env_server.episode import Episode, Transition, Want
from tests.golden import Draws, Parity, golden


def records_of(*names: str) -> list[Any]:
    """The recorded trajectories of the variants whose names hold one of these."""
    return [record for record in golden("manager_trajectories") if any(name in record["variant"] for name in names)]


def begin(environment: Environment, record: Any) -> Episode:
    """An episode under the limits of the record; `environment` has its options."""
    limits = Limits(max_actions=record["max_actions_per_traj"], max_actions_per_turn=record["max_actions_per_turn"])
    episode = Episode(environment, limits)
    episode.reset(0, 0)
    return episode


def replay_turns(
    record: Any, episode: Episode, parity: Parity, deviation: Callable[[Transition], str] = lambda transition: ""
) -> None:
    """Compares every turn. `deviation` names the chosen one that may change what is shown after a turn."""
    parity.episodes += 1
    for turn in record["turns"]:
        where = f"{record['id']} turn {turn['turn']}"
        draws = episode.environment._dynamics = Draws(turn.get("rng_uniforms", []))
        transition = episode.turn(turn["parsed_actions"], Want())
        parity.steps += 1
        parity.equal(f"{where} state", transition.parts, turn["next_state"], deviation(transition))
        parity.equal(f"{where} draws", draws.left, [])
        parity.equal(f"{where} reward", transition.reward, turn["turn_reward"])
        parity.equal(f"{where} active", not episode.end_reason, turn["still_active"])
        parity.equal(f"{where} actions", episode.actions, turn["status"]["num_actions"])
        executed = sum(outcome not in (None, UNKNOWN_NAME) for outcome in transition.outcomes)
        parity.equal(f"{where} executed", executed, len(turn["executed_actions"]))
        # The original calls every end without success truncated.
        won = turn["status"]["terminated"] and not turn["status"]["truncated"]
        parity.equal(f"{where} success", bool(transition.success), won)
