"""Server of texts of a given size with tuned OpenEnv: python -m benchmarks.peers.openenv_payload --port N."""

from __future__ import annotations

import argparse
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from benchmarks.peers.openenv_server import MAX_SESSIONS, TUNED, serve


class PayloadAction(Action):
    name: str


class PayloadObservation(Observation):
    text: str


class Payload(Environment[PayloadAction, PayloadObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._size = self._count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> PayloadObservation:
        self._size, self._count = int(options.get("size", 100)), 0
        return self._show()

    async def reset_async(self, **options: Any) -> PayloadObservation:
        return self.reset(**options)

    def step(self, action: PayloadAction, timeout_s: float | None = None, **options: Any) -> PayloadObservation:
        self._count += 1
        return self._show()

    async def step_async(self, action: PayloadAction, **options: Any) -> PayloadObservation:
        return self.step(action)

    def _show(self) -> PayloadObservation:
        text = f"{self._count:08d}"[: self._size]
        return PayloadObservation(text=text + "x" * (self._size - len(text)), reward=0.0, done=False)

    @property
    def state(self) -> State:
        return State(step_count=self._count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    serve(create_app(Payload, PayloadAction, PayloadObservation, max_concurrent_envs=MAX_SESSIONS), port, **TUNED)


if __name__ == "__main__":
    main()
