"""Program that plays every environment of a server with two scripted policies, through the client.

It does not train (`starpod train` does). It shows how to use the client in your own program: it plays many episodes at
once, each in its own coroutine, on all server processes, which the client finds through one address.

    starpod serve --workers 2 --port 50051
    python examples/scripted_policy.py 127.0.0.1:50051
"""

import asyncio
import random
import sys
from statistics import fmean

from starpod.client import Fleet, Limits, Session, Want

EPISODES = 16
LIMITS = Limits(max_turns=100, max_actions_per_turn=1, max_actions=100)
POLICIES = {"expert": "expert_action", "random": "valid_actions"}
"""The capability of an environment that each policy needs."""


def choose_action(policy: str, session: Session, rng: random.Random) -> object:
    """Return an action of the environment's expert, or a random valid one; None if there is none."""
    if policy == "expert":
        return session.observation.expert_action
    actions = session.observation.valid_actions
    return rng.choice(actions) if actions else None


async def play_episode(fleet: Fleet, environment: str, policy: str, seed: int) -> tuple[bool, int, float]:
    """Play one episode from open to close. Return whether it was solved, its number of turns and its reward."""
    (session,) = await fleet.open(environment, seed=seed, want=Want(**{POLICIES[policy]: True}), limits=LIMITS)
    rng, success, turns, reward = random.Random(seed), False, 0, 0.0
    while not session.done and (action := choose_action(policy, session, rng)) is not None:
        transition = await session.step(action)
        success, turns, reward = bool(transition.success), turns + 1, reward + transition.reward
    await session.close()
    return success, turns, reward


async def main() -> None:
    async with Fleet(sys.argv[1]) as fleet:
        for spec in await fleet.describe():
            for policy in (name for name, capability in POLICIES.items() if getattr(spec.capabilities, capability)):
                episodes = [play_episode(fleet, spec.id, policy, seed) for seed in range(EPISODES)]
                solved, turns, reward = map(fmean, zip(*await asyncio.gather(*episodes), strict=True))
                print(f"{spec.id} {policy}: {solved:.0%} solved, {turns:.1f} turns, mean reward {reward:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
