"""A game: a session that a person plays, with what was played so far. The terminal and the live site share it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from starpod.client import (
    Action,
    EpisodePath,
    Fleet,
    Limits,
    Opening,
    PathTurn,
    ReplayDiverged,
    Reseeding,
    Session,
    Snapshot,
    ToolCall,
    Transition,
    Want,
)
from starpod.v1 import environment_pb2 as pb
from starpod.v1.spelling import nearest
from starpod.v1.values import action_text

SEPARATOR = "||"
"""Separator between the actions of one turn."""
MOST_CHOICES = 60
"""Maximum number of actions that a game offers."""


class Impossible(Exception):
    """Raised if a request cannot be carried out. The message says why; nothing has changed."""


@dataclass(slots=True)
class PlayedGame:
    """A live session and the path that leads to its state."""

    session: Session
    spec: pb.EnvironmentSpec
    start: Opening | Snapshot
    """Origin of the path; a snapshot if the turns before the game are not known."""
    events: list[PathTurn | Reseeding] = field(default_factory=list)

    @classmethod
    async def open(
        cls,
        fleet: Fleet,
        spec: pb.EnvironmentSpec,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        lease_seconds: float = 0.0,
    ) -> Self:
        """Open a game.

        Args:
            seed: seed of the start; None lets the server draw it.
            limits: limits of each episode; by default the environment's.
            lease_seconds: as in Fleet.open.
        """
        (session,) = await fleet.open(
            spec.id,
            seed=seed,
            options=options or None,
            want=wanted(spec),
            limits=limits,
            version=f"=={spec.version}",
            lease_seconds=lease_seconds,
        )
        return cls(session, spec, opening_of(session, options))

    @property
    def path(self) -> EpisodePath:
        return EpisodePath(self.start, [*self.events], self.session.observation.text)

    @property
    def choices(self) -> list[str]:
        """The valid actions if the environment lists them, otherwise its action names; at most `MOST_CHOICES`."""
        valid_actions = self.session.observation.valid_actions
        names = self.spec.action_space.names if valid_actions is None else map(action_text, valid_actions)
        return list(dict.fromkeys(names))[:MOST_CHOICES]

    @property
    def hint(self) -> str:
        """The expert's next action as a person would type it; empty if there is none."""
        action = self.session.observation.expert_action
        return "" if action is None or self.session.done else action_text(action)

    async def picture(self, *modes: str) -> bytes | str:
        """Return the state, drawn in the first of these modes that the environment has; empty if it has none."""
        mode = next((mode for mode in modes if mode in self.spec.render_modes), "")
        return await self.session.render(mode) if mode else ""

    async def next_turn(self) -> PathTurn:
        """Return the turn that begins in the current state, still without actions."""
        if self.session.done:
            raise Impossible("The episode is over: take a turn back, or begin another one.")
        snapshot = await self.session.snapshot() if self.spec.capabilities.snapshot else None
        return PathTurn((), self.session.observation.text, snapshot)

    async def step(self, actions: Sequence[Action]) -> Transition:
        """Play one turn. Raises Impossible, StarpodError."""
        turn = await self.next_turn()
        transition = await self.session.step(actions)
        self.add(turn, actions)
        return transition

    def add(self, turn: PathTurn, actions: Sequence[Action]) -> None:
        """Add a turn from `next_turn` that was played with these actions."""
        self.events.append(PathTurn(tuple(actions), turn.before, turn.snapshot))

    async def undo(self, fleet: Fleet, *, lease_seconds: float = 0.0) -> None:
        """Take the last turn back. The game then has another session. Raises Impossible, StarpodError."""
        indices = [index for index, event in enumerate(self.events) if isinstance(event, PathTurn)]
        if not indices:
            raise Impossible("There is no turn to take back.")
        previous_session = self.session
        self.session = await reach(
            fleet, self.path, len(indices) - 1, want=previous_session.want, lease_seconds=lease_seconds
        )
        del self.events[indices[-1] :]
        await fleet.close_sessions([previous_session])

    async def restart(self, *, again: bool) -> None:
        """Begin another episode in the session: the same one `again`, or one with a seed that the server draws."""
        session = self.session
        seeds = (session.seed, session.dynamics_seed) if again else (None, None)
        await session.reset(seed=seeds[0], dynamics_seed=seeds[1])
        assert isinstance(self.start, Opening)
        self.start, self.events = opening_of(session, self.start.options), []


async def reach(fleet: Fleet, path: EpisodePath, turn: int | None, *, want: Want, lease_seconds: float) -> Session:
    """Return a session in an earlier state of an episode.

    Args:
        turn: index of the turn before which the state is; None: the state after the last turn.
        lease_seconds: as in Fleet.open.

    Raises:
        Impossible: the replay differs from the path.
        StarpodError: the session cannot be opened, or a call failed.
    """
    try:
        return await fleet.reach(path, turn, want=want, lease_seconds=lease_seconds)
    except ReplayDiverged as error:
        raise Impossible(str(error)) from None


def wanted(spec: pb.EnvironmentSpec) -> Want:
    """Return the optional fields of observations that a person is shown."""
    can = spec.capabilities
    return Want(valid_actions=can.valid_actions, expert_action=can.expert_action, score=can.score)


def opening_of(session: Session, options: Mapping[str, Any] | None) -> Opening:
    """Return how the session's episode can be opened again, with the same random transitions."""
    return Opening(
        session.environment_id,
        session.seed,
        session.dynamics_seed,
        dict(options or {}),
        session.limits,
        f"=={session.version}",
    )


def parse_turn(line: str, spec: pb.EnvironmentSpec) -> list[Action]:
    """Return the actions of a typed turn. Raises Impossible with the nearest name if one is unknown."""
    if any("\ud800" <= character <= "\udfff" for character in line):
        raise Impossible(f"{line!r} is not UTF-8: type it again.")
    return [_parse_action(part.strip(), spec.action_space) for part in line.split(SEPARATOR)]


def _parse_action(text: str, space: pb.ActionSpace) -> Action:
    """Return a tool call if the text begins with a tool's name, an action's name as it is spelt, or else the text."""
    name, _, rest = text.partition(" ")
    tools = [tool.name for tool in space.tools]
    if name in tools:
        try:
            arguments = json.loads(rest.strip() or "{}")
        except ValueError as error:
            raise Impossible(f"The arguments of {name} are not JSON: {error}.") from None
        if not isinstance(arguments, dict):
            raise Impossible(f"The arguments of {name} are not a JSON object.")
        return ToolCall(name, arguments)
    names = {name.lower(): name for name in space.names}
    if text.lower() in names:
        return names[text.lower()]
    if space.grammar or not (names or tools):
        return text
    raise Impossible(f"There is no action {text!r}{nearest(text if names else name, [*space.names, *tools])}")
