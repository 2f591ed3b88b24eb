"""Rules of all hosted environments that need no other package."""

import random
import threading

from starpod.env_server.environment import Concurrency, EnvironmentSpec, Outcome
from starpod.env_server.hosting.hosted import Game, Hosted
from starpod.v1.values import Action


class SlowEnd(Game):
    """Its end waits for another server."""

    answer, closed = threading.Event(), threading.Event()

    def play(self, action: Action) -> Outcome:
        return Outcome()

    def observe(self) -> str:
        return "open"

    def close(self) -> None:
        self.answer.wait(5)
        self.closed.set()


class Slow(Hosted):
    spec = EnvironmentSpec("slow-v1", "1.0.0", "Its end is slow", concurrency=Concurrency.THREAD)

    def begin(self, luck: int) -> Game:
        return SlowEnd(None)

    def render(self, mode: str = "text") -> str:
        return "open"


def test_an_end_that_waits_does_not_hold_up_who_drops_the_session() -> None:
    """The event loop drops it: closing a session of a hanging ORS server stopped all others for 60 s."""
    environment = Slow()
    environment.reset(random.Random(0))
    del environment
    assert not SlowEnd.closed.is_set()
    SlowEnd.answer.set()
    assert SlowEnd.closed.wait(30)
