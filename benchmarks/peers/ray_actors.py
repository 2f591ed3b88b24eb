"""The lake in Ray: one actor (and process) per environment, all stepped together, as verl-agent does.

    echo 2 | python -m benchmarks.peers.ray_actors SESSIONS

For each number of seconds on standard input it steps that long and prints the measurement as JSON.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nothing outside this machine reaches it

import ray

from benchmarks.peers.driver import Pipes, serve_runs
from benchmarks.serving.lake import new_episode
from starpod.env_server.episodes.live_episode import Want


@ray.remote(num_cpus=0)
class Lake:
    """Actor with one environment."""

    def __init__(self) -> None:
        self._episode = new_episode()

    def reset(self) -> str:
        self._episode.reset(0, 0)
        return str(self._episode.observe(Want()).parts)

    def step(self, action: str) -> tuple[str, float, bool]:
        transition = self._episode.turn([action], Want())
        return str(transition.parts), transition.reward, bool(transition.end_reason)


def main() -> None:
    pipes = Pipes()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)
    actors = [Lake.remote() for _ in range(int(sys.argv[1]))]

    def reset() -> None:
        ray.get([actor.reset.remote() for actor in actors])

    def step(action: str) -> list[tuple[float, bool]]:
        return [(reward, over) for _, reward, over in ray.get([actor.step.remote(action) for actor in actors])]

    reset()
    serve_runs(pipes, len(actors), reset, step)
    ray.shutdown()


if __name__ == "__main__":
    main()
