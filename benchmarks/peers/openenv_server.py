"""Server of the lake with OpenEnv: python -m benchmarks.peers.openenv_server --port N [--tuned].

The code is what `openenv init` generates, except that it allows more than one session. --tuned applies everything that
we found to help steps of microseconds: asynchronous methods, so that OpenEnv steps them in its event loop instead of
handing each to a thread, and WebSockets without compression and pings.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from benchmarks.serving.lake import new_episode
from starpod.env_server.episodes.live_episode import Want

NOTHING = Want()
MAX_SESSIONS = 4096


class LakeAction(Action):
    name: str


class LakeObservation(Observation):
    text: str


class LakeEnvironment(Environment[LakeAction, LakeObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._episode = new_episode()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> LakeObservation:
        self._episode.reset(seed or 0, 0)
        return LakeObservation(text=str(self._episode.observe(NOTHING).parts))

    def step(self, action: LakeAction, timeout_s: float | None = None, **options: Any) -> LakeObservation:
        transition = self._episode.turn([action.name], NOTHING)
        return LakeObservation(
            text=str(transition.observation.parts), reward=transition.reward, done=bool(transition.end_reason)
        )

    @property
    def state(self) -> State:
        return State(step_count=self._episode.turns)


class TunedLake(LakeEnvironment):
    """The lake with asynchronous methods, which OpenEnv calls in its event loop."""

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> LakeObservation:
        return self.reset(seed)

    async def step_async(self, action: LakeAction, **options: Any) -> LakeObservation:
        return self.step(action)


TUNED: dict[str, Any] = {"ws_per_message_deflate": False, "ws_ping_interval": None}
"""Settings of uvicorn with --tuned."""


def serve(app: Any, port: int, **settings: Any) -> None:
    """Serve the application, and print one line when it listens. settings: arguments of uvicorn.Config."""
    listener = socket.create_server(("127.0.0.1", port), backlog=MAX_SESSIONS)
    print(f"Serving on 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", **settings)).run(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tuned", action="store_true")
    arguments = parser.parse_args()
    lake = TunedLake if arguments.tuned else LakeEnvironment
    app = create_app(lake, LakeAction, LakeObservation, max_concurrent_envs=MAX_SESSIONS)
    serve(app, arguments.port, **(TUNED if arguments.tuned else {}))


if __name__ == "__main__":
    main()
