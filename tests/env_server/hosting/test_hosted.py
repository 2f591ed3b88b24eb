"""Rules of all hosted environments that need no other package."""

import random
import threading
from typing import ClassVar

import pytest

from starpod.env_server.authoring.environment import Busy, Concurrency, EnvironmentSpec, Outcome
from starpod.env_server.hosting.hosted import Hosted, HostedGame
from starpod.env_server.hosting.ors import ORSFactory, ORSGame
from starpod.env_server.hosting.ors_server import ORSError, ORSServer
from starpod.env_server.hosting.request import HostingRequest
from starpod.v1.values import Action


class SlowEnd(HostedGame):
    """A game whose end waits for another server."""

    answer, closed = threading.Event(), threading.Event()

    def play(self, action: Action) -> Outcome:
        return Outcome()

    def observe(self) -> str:
        return "open"

    def close(self) -> None:
        self.answer.wait(60)
        self.closed.set()


class Slow(Hosted):
    spec = EnvironmentSpec("slow-v1", "1.0.0", "Its end is slow", concurrency=Concurrency.THREAD)

    def begin(self, luck: int) -> HostedGame:
        return SlowEnd(None)

    def render(self, mode: str = "text") -> str:
        return "open"


class Counted(HostedGame):
    """A game whose third action finds no server the first time."""

    failures: ClassVar[int] = 1
    live: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(None)
        self.played = 0
        Counted.live += 1

    def play(self, action: Action) -> Outcome:
        if self.played == 2 and Counted.failures:
            Counted.failures -= 1
            raise Busy("no server answers")
        self.played += 1
        return Outcome()

    def observe(self) -> str:
        return f"played {self.played}"

    def close(self) -> None:
        Counted.live -= 1


class Counts(Hosted):
    spec = EnvironmentSpec("counts-v1", "1.0.0", "It counts")

    def begin(self, luck: int) -> HostedGame:
        return Counted()

    def render(self, mode: str = "text") -> str:
        return "counting"


def test_a_replay_that_broke_off_starts_over() -> None:
    """The session of the half-played game went on where the replay had stopped."""
    environment = Counts()
    environment.set_state({"past": ["on"] * 3, "luck": 0, "dynamics_seed": 0, "placed": True})
    with pytest.raises(Busy):
        environment.observe()
    assert Counted.live == 0
    assert environment.observe() == "played 3"


def test_a_session_of_an_ors_server_whose_task_cannot_be_read_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ORSError("broke off")

    deleted: list[str] = []
    monkeypatch.setattr(ORSServer, "create", lambda *_: "session")
    monkeypatch.setattr(ORSServer, "ask", fail)
    monkeypatch.setattr(ORSServer, "delete", lambda _, session: deleted.append(session))
    request = HostingRequest.parse("http://127.0.0.1:1/sums", ())
    with pytest.raises(ORSError, match="broke off"):
        ORSGame(ORSFactory(request, ORSServer("http://127.0.0.1:1"), "sums", "train", 1, {}, None), 0)
    assert deleted == ["session"]


def test_an_end_that_waits_does_not_hold_up_who_drops_the_session() -> None:
    """The event loop drops it: closing a session of a hanging ORS server stopped all others for 60 s."""
    environment = Slow()
    environment.reset(random.Random(0))
    del environment
    assert not SlowEnd.closed.is_set()
    SlowEnd.answer.set()
    assert SlowEnd.closed.wait(60)
