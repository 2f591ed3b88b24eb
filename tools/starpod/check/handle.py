"""Sessions of a test, and the recorded episode that tests compare with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starpod.check.connection import CheckConnection
from starpod.v1 import environment_pb2 as pb

Turn = tuple[pb.Action, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """An episode that was recorded before any test disturbed the server.

    It begins with empty turns, so it has several turns even if the first action ends the episode.
    """

    start: pb.Session
    turns: tuple[Turn, ...]
    transitions: tuple[pb.Transition, ...]
    """The result of each turn."""


class Handle:
    """A session with its connection, epoch and next step index."""

    def __init__(self, connection: CheckConnection, session: pb.Session) -> None:
        self.connection = connection
        self.session = session
        self.id = session.session_id
        self.epoch = session.epoch
        self.index = session.step_index

    def request(self, actions: Iterable[pb.Action] = (), *, ahead: int = 0, epoch: int | None = None) -> pb.StepRequest:
        """Return the request of the next Step, or of the Step `ahead` indices after it.

        Args:
            ahead: added to the next step index; negative for an earlier Step, which is at least Step 0.
            epoch: epoch of the session; None: the current one.
        """
        return pb.StepRequest(
            session_id=self.id,
            epoch=self.epoch if epoch is None else epoch,
            step_index=max(0, self.index + ahead),
            actions=actions,
        )

    def reset_request(self, **fields: Any) -> pb.ResetRequest:
        return pb.ResetRequest(session_id=self.id, epoch=self.epoch, **fields)

    def fork_request(self, **fields: Any) -> pb.ForkRequest:
        return pb.ForkRequest(session_id=self.id, epoch=self.epoch, step_index=self.index, **fields)

    async def step(self, actions: Iterable[pb.Action] = (), want: pb.Want | None = None) -> pb.Transition:
        request = self.request(actions)
        if want is not None:
            request.want.CopyFrom(want)
        reply: pb.StepResponse = await self.connection.call(request)
        self.index += 1
        return reply.transition

    async def play(self, turns: Iterable[Turn]) -> list[pb.Transition]:
        """Play the turns until the episode ends, and return their transitions."""
        transitions: list[pb.Transition] = []
        for turn in turns:
            transitions.append(await self.step(turn))
            if transitions[-1].end_reason:
                break
        return transitions
