"""Live sessions of the site: opening, playing, taking turns back, and replaying an episode up to a turn."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

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
    Unreachable,
)
from starpod.client.transport import Transport
from starpod.remote.game import Impossible, PlayedGame, reach, wanted
from starpod.trainer.agents.base import Agent, Task
from starpod.trainer.agents.scripted import GivenTurn
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.output.words import remarks
from starpod.trainer.rollout.frames import draw_path
from starpod.trainer.rollout.play import play
from starpod.trainer.rollout.saved_starts import SavedStart
from starpod.v1 import environment_pb2 as pb

MOST_GAMES = 100
"""Maximum number of open sessions. Beyond it, the least recently used one is closed."""
MOST_FRAMES = 32
"""Maximum number of episodes whose pictures are kept."""
MOST_TURNS = 100
"""Maximum number of turns that a policy plays in a session for one request."""
MOST_STEPS = 1000
"""Maximum number of durations of steps that are kept per server. The oldest are dropped first."""
REPLAYED = (
    "observation",
    "text",
    "thought",
    "blocks",
    "reply",
    "logprobs",
    "versions",
    "finish",
    "actions",
    "outcomes",
    "criteria",
    "info",
    "agent_id",
)
"""Fields of a turn that a game has if the turn was replayed."""
YOU = "you"
PATIENCE = 15.0
LEASE_SECONDS = 3600.0

UNLIMITED = Limits(max_turns=0, max_actions=0)


@dataclass(frozen=True, slots=True)
class GameTurn:
    """One turn of a game, as the page shows it."""

    by: str
    """Who played the turn: `YOU`, the name of a policy, or "the episode"."""
    actions: list[str]
    reward: float
    remarks: str


@dataclass
class LiveGame(PlayedGame):
    """A game of the site. All turns are played by `rollout.play`, those of a person too, so that they can be saved."""

    turns: list[GameTurn] = field(default_factory=list)
    episode: Episode = field(init=False)
    origin: str = ""
    """Link of the episode and turn from which the game was forked."""
    run: Path | None = None
    """Folder of that episode's run."""
    id: str = field(default_factory=partial(secrets.token_urlsafe, 9))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.episode = Episode.begin(self.session, 0)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def options(self) -> dict[str, Any]:
        return {} if isinstance(self.start, Snapshot) else dict(self.start.options or {})

    @property
    def copied(self) -> bool:
        """Whether the session is a copy of another client's session, whose earlier turns are not known."""
        return isinstance(self.start, Snapshot)

    @property
    def task(self) -> Task:
        """The task of a run whose episodes can begin like this game. Raises Impossible for a copy."""
        if self.copied:
            raise Impossible("This is a copy of another's session, whose history is unknown.")
        return Task(self.spec.id, options=self.options, limits=self.session.limits)

    @property
    def reseeded(self) -> bool:
        """Whether the random transitions of the game are not those of its seeds."""
        return any(isinstance(event, Reseeding) for event in self.events)

    def python(self, address: str) -> str:
        """Return a program that plays the same turns; empty for a copy of another client's session."""
        if isinstance(self.start, Snapshot):
            return ""
        start, limits = self.start, self.session.limits
        fields = {
            "seed": start.seed,
            "dynamics_seed": start.dynamics_seed,
            "options": self.options,
            "limits": f"Limits({limits.max_turns}, {limits.max_actions_per_turn}, {limits.max_actions})",
            "version": repr(start.version),
        }
        arguments = "".join(f", {name}={value}" for name, value in fields.items() if value != {})
        body, turns = "", list[Sequence[Action]]()
        for event in self.events:
            if isinstance(event, PathTurn):
                turns.append(event.actions)
            else:
                seeds = f"dynamics_seeds=[{event.dynamics_seed}]"
                body += f"{_program(turns)}    (session,) = session.fork(1, reseed=True, {seeds})\n"
                turns = []
        body += _program(turns)
        imports = ["Limits", "SyncFleet", *(["ToolCall"] if "ToolCall(" in body else [])]
        return (
            f"from starpod.client import {', '.join(imports)}\n\n"
            f"with SyncFleet({address!r}) as fleet:\n"
            f"    (session,) = fleet.open({self.spec.id!r}{arguments})\n"
            f"    print(session.observation.text)\n{body}"
        )

    def as_start(self) -> SavedStart:
        """Return the current state as a start state for training. Raises Impossible."""
        if self.session.done or not self.turns:
            raise Impossible("A start state needs at least one played turn, and an episode that is not over.")
        return SavedStart(
            self.spec.id,
            self.episode.seed,
            self.episode.dynamics_seed,
            [action for turn in self.episode.turns for action in turn.actions],
            self.session.observation.text,
            self.session.version,
            self.task.options,
        )

    async def act(self, actions: Sequence[Action], by: str = YOU) -> None:
        """Play one turn. Raises Impossible, StarpodError."""
        await self._play(GivenTurn(actions), by, actions)

    async def go_on(self, agent: Agent, by: str) -> None:
        """Let an agent continue in the session itself, to the end of the episode or for `MOST_TURNS` turns.

        Raises Impossible if the agent fails (its earlier turns are kept), and AgentRefused.
        """
        for _ in range(MOST_TURNS):
            if self.session.done or not await self._play(agent, by):
                break

    async def _play(self, agent: Agent, by: str, actions: Sequence[Action] | None = None) -> bool:
        """Let an agent play a turn, and return whether it had an action. actions: what it plays, if that is known."""
        turn, episode = await self.next_turn(), self.episode
        await play(agent, self.session, episode=episode, turns=1)
        end = episode.end
        if not self.session.done:  # the agent stopped, but another one may continue
            episode.end, episode.success = "", None
        if end == "failed":
            del episode.turns[len(self.turns) :]
            raise Impossible(f"The turn was not played: {episode.error}")
        if len(episode.turns) == len(self.turns):
            return False
        episode.final_observation = self.session.observation.text
        self.add(turn, episode.turns[-1].actions if actions is None else actions)
        self.show_last_turn(by)
        return True

    def show_last_turn(self, by: str) -> None:
        """Add the last turn of the episode's record to the turns that the page shows."""
        turn = self.episode.turns[-1]
        self.turns.append(GameTurn(by, turn.actions, turn.own_reward, ", ".join(remarks(turn))))

    async def undo(self, fleet: Fleet, *, lease_seconds: float = LEASE_SECONDS) -> None:
        await super().undo(fleet, lease_seconds=lease_seconds)
        self.turns.pop()
        self.episode.turns.pop()
        self.episode.end, self.episode.success = "", None
        self.episode.final_observation = self.session.observation.text

    async def fork(self) -> LiveGame:
        """Return a copy of the game with the same random state. Raises StarpodError."""
        (session,) = await self.session.fork()
        twin = LiveGame(session, self.spec, self.start, [*self.events], [*self.turns], self.origin, self.run)
        twin.episode = copy.deepcopy(self.episode)
        return twin


class Games:
    """The fleet of servers and the site's sessions on it. It connects when it is first needed.

    address: address of the servers, or a function that returns it ("" while the address is not known yet).
    """

    def __init__(self, address: str | Callable[[], str], access: Transport) -> None:
        self._find = address if callable(address) else lambda: address
        self._address = ""
        self._access = access
        self._fleet: Fleet | None = None
        self._connecting = asyncio.Lock()
        self._games: OrderedDict[str, LiveGame] = OrderedDict()
        self._frames: OrderedDict[str, list[bytes]] = OrderedDict()
        self._drawing = asyncio.Lock()
        self._steps: dict[str, deque[float]] = {}

    @property
    def address(self) -> str:
        """Address of the servers. Raises Unreachable if it is not known yet."""
        self._address = self._address or self._find()
        if not self._address:
            raise Unreachable("The run has just started, and its servers are not up yet.")
        return self._address

    async def fleet(self) -> Fleet:
        """Return the fleet, connected. Raises StarpodError if no server can be used."""
        async with self._connecting:
            if self._fleet is None:
                fleet = Fleet(self.address, token=self._access.token, tls=self._access.tls, patience=PATIENCE)
                await fleet.start()
                self._fleet = fleet
            return self._fleet

    async def close(self) -> None:
        if self._fleet is not None:
            await self._fleet.close()

    def note_step_time(self, address: str, turns: Sequence[Turn]) -> None:
        """Record how long a server took for the steps of these turns."""
        times = self._steps.setdefault(address, deque(maxlen=MOST_STEPS))
        times.extend(turn.stepping for turn in turns if turn.actions)

    def steps(self, address: str) -> list[float]:
        """Return the durations in seconds of the site's newest steps on a server."""
        return list(self._steps.get(address, ()))

    async def spec(self, environment: str) -> pb.EnvironmentSpec:
        """Return the spec of an environment's newest version.

        Raises:
            Impossible: No server hosts the environment.
            StarpodError: No server can be reached or used.
        """
        specs = await (await self.fleet()).describe()
        if not specs:
            raise Unreachable(f"No server at {self.address} can be reached now: is it still running?")
        for spec in specs:
            if spec.id == environment:
                return spec
        raise Impossible(f"{self.address} does not host {environment}.")

    def all(self) -> list[LiveGame]:
        """Return the open games, most recently used first."""
        return list(reversed(self._games.values()))

    def get(self, name: str) -> LiveGame:
        """Return a game and mark it as used. Raises Impossible if it was closed."""
        if name not in self._games:
            raise Impossible("This session has ended: it was closed, or the site was restarted.")
        self._games.move_to_end(name)
        return self._games[name]

    async def open(self, environment: str, *, options: Mapping[str, Any], seed: int | None = None) -> LiveGame:
        """Open a new game, whose number of turns is unlimited.

        Args:
            environment: id of the environment; its newest version is opened.
            seed: seed of the start; None lets the server draw it.

        Raises:
            Impossible: no server hosts the environment.
            StarpodError: a call failed.
        """
        spec, fleet = await self.spec(environment), await self.fleet()
        return await self.keep(
            await LiveGame.open(fleet, spec, seed=seed, options=options, limits=UNLIMITED, lease_seconds=LEASE_SECONDS)
        )

    async def adopt(self, session: Session) -> LiveGame:
        """Return a new game for a copy of another client's session. Raises Impossible, StarpodError."""
        spec = await self.spec(session.environment_id)
        return await self.keep(LiveGame(session, spec, await session.snapshot()))

    async def keep(self, game: LiveGame) -> LiveGame:
        """Make a game available by its id, and close the least recently used ones beyond `MOST_GAMES`."""
        self._games[game.id] = game
        while len(self._games) > MOST_GAMES:
            _, oldest_game = self._games.popitem(last=False)
            await oldest_game.session.close()
        return game

    async def forget(self, game: LiveGame) -> None:
        self._games.pop(game.id, None)
        await game.session.close()

    async def replay(
        self, episode: Episode, path: EpisodePath, turns: int, by: Callable[[int], str] = lambda number: "the episode"
    ) -> LiveGame:
        """Open a game in the state before a turn of an episode. The caller keeps or closes it.

        Args:
            turns: index of that turn; the turns before it are replayed.
            by: function that returns who played the turn with a given number.

        Raises:
            Impossible: the server's observations differ from the episode's.
        """
        spec, fleet, origin = await self.spec(path.origin.environment_id), await self.fleet(), path.origin
        session = await reach(fleet, path, turns, want=wanted(spec), lease_seconds=LEASE_SECONDS)
        if isinstance(origin, Opening):
            origin = replace(origin, limits=session.limits, version=f"=={session.version}")
        game = LiveGame(session, spec, origin, path.until(turns)[:-1])
        record = game.episode
        record.task, record.dynamics_seed, record.begun_at = episode.task, episode.dynamics_seed, 0
        for number, turn in enumerate(episode.turns[:turns]):
            fields = {name: getattr(turn, name) for name in REPLAYED}
            record.turns.append(Turn(fresh=not number, parts={"environment": turn.own_reward}, **fields))
            game.show_last_turn(by(number))
        record.final_observation = session.observation.text
        if session.done:
            record.end, record.success = episode.end, episode.success
        return game

    async def frames(self, key: str, path: EpisodePath) -> list[bytes]:
        """Return a picture of each state of an episode, first and last included, drawn during a replay.

        key: key under which the pictures are cached. Raises Impossible if there are no pictures, or if the replay
        differs.
        """
        environment = path.origin.environment_id
        async with self._drawing:  # a page requests all pictures at once, and one replay draws them
            if key not in self._frames:
                if "png" not in (await self.spec(environment)).render_modes:
                    raise Impossible(f"{environment} draws no pictures.")
                try:
                    self._frames[key] = await draw_path(await self.fleet(), path)
                except ReplayDiverged as error:
                    raise Impossible(str(error)) from None
            while len(self._frames) > MOST_FRAMES:
                self._frames.popitem(last=False)
            return self._frames[key]


def path_of(episode: Episode, task: Task) -> EpisodePath:
    """Return the path of a recorded episode. Raises Impossible if its first moves are not in the record."""
    if episode.begun_at:
        raise Impossible("The environment's expert began this episode, but its moves are not in the record.")
    return task.path(episode)


def _program(turns: Sequence[Sequence[Action]]) -> str:
    """Return the lines of a program that plays these turns."""
    lines = "".join(f"        {list(actions)!r},\n" for actions in turns if actions)
    if not lines:
        return ""
    return (
        f"    for actions in [\n{lines}    ]:\n"
        "        transition = session.step(actions)\n"
        "        print(transition.observation.text, transition.reward)\n"
    )
