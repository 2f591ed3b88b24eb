"""Live sessions of the site: opening, playing, taking turns back, and replaying an episode up to a turn."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from starpod.client import (
    Action,
    EpisodePath,
    Fleet,
    Limits,
    ReplayDiverged,
    Reseeding,
    Session,
    Snapshot,
    StarpodError,
    ToolCall,
    Unreachable,
    Want,
)
from starpod.client.transport import Transport
from starpod.trainer.agents.base import Agent, Task
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rollout.frames import draw_path
from starpod.trainer.rollout.play import play
from starpod.trainer.rollout.saved_starts import SavedStart
from starpod.ui.policies import Impossible
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
SEPARATOR = "||"
"""Separator between the actions of one turn."""
YOU = "you"
PATIENCE = 15.0
LEASE_SECONDS = 3600.0

UNLIMITED = Limits(max_turns=0, max_actions=0)

Reseedings = Mapping[int, Reseeding]
"""Reseedings of the dynamics, by the number of turns before them."""


@dataclass(frozen=True, slots=True)
class GameTurn:
    """One turn of a game."""

    by: str
    """Who played the turn: `YOU`, the name of a policy, or "the episode"."""
    actions: list[str]
    before: str
    """Observation before the turn."""
    reward: float
    remarks: str
    snapshot: Snapshot | None
    """Snapshot of the state before the turn; None if the environment has no snapshots."""


@dataclass(slots=True)
class Game:
    """A live session of the site, with its turns."""

    id: str
    session: Session
    spec: pb.EnvironmentSpec
    task: Task
    episode: Episode
    turns: list[GameTurn] = field(default_factory=list)
    reseedings: Reseedings = field(default_factory=dict)
    origin: str = ""
    """Link of the episode and turn from which the game was forked."""
    run: Path | None = None
    """Folder of that episode's run."""
    copied: bool = False
    """Whether the session is a copy of another client's session, whose earlier turns are not known."""
    success: bool | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def choices(self) -> list[str]:
        """Actions that the page offers as buttons, at most 60."""
        valid = self.session.observation.valid_actions
        actions = [text_of(action) for action in valid] if valid is not None else list(self.spec.action_space.names)
        return list(dict.fromkeys(actions))[:60]

    @property
    def hint(self) -> str:
        """The expert's next action; empty if there is none."""
        action = self.session.observation.expert_action
        return "" if action is None or self.session.done else text_of(action)

    def python(self, address: str) -> str:
        """Return a program that plays the same turns; empty for a copy of another client's session."""
        if self.copied:
            return ""
        limits = self.session.limits
        fields = {
            "seed": self.episode.seed,
            "dynamics_seed": self.episode.dynamics_seed,
            "options": self.task.options,
            "limits": f"Limits({limits.max_turns}, {limits.max_actions_per_turn}, {limits.max_actions})",
            "version": repr(f"=={self.session.version}"),
        }
        arguments = "".join(f", {name}={value}" for name, value in fields.items() if value != {})
        turns = [[self._action(turn, text) for text in turn.actions] for turn in self.turns]
        ends = [*self.reseedings, len(turns)]
        body = _program(turns[: ends[0]])
        for (at, reseeding), end in zip(self.reseedings.items(), ends[1:], strict=True):
            seed = reseeding.dynamics_seed
            body += f"    (session,) = session.fork(1, reseed=True, dynamics_seeds=[{seed}])\n{_program(turns[at:end])}"
        imports = ["Limits", "SyncFleet", *(["ToolCall"] if "ToolCall(" in body else [])]
        return (
            f"from starpod.client import {', '.join(imports)}\n\n"
            f"with SyncFleet({address!r}) as fleet:\n"
            f"    (session,) = fleet.open({self.spec.id!r}{arguments})\n"
            f"    print(session.observation.text)\n{body}"
        )

    def _action(self, turn: GameTurn, text: str) -> Action:
        """Return an action as it was sent: typed text is parsed, because it may be a tool call."""
        return parse(text, self.spec) if turn.by == YOU else text

    def as_start(self) -> SavedStart:
        """Return the current state as a start state for training. Raises Impossible."""
        if self.session.done or not self.turns:
            raise Impossible("A start state needs at least one played turn, and an episode that is not over.")
        if self.copied:
            raise Impossible("This is a copy of another's session, whose history is unknown.")
        session = self.session
        actions = [action for turn in self.turns for action in turn.actions]
        return SavedStart(
            self.spec.id,
            self.episode.seed,
            self.episode.dynamics_seed,
            actions,
            session.observation.text,
            session.version,
            dict(self.task.options),
        )

    async def picture(self) -> bytes | str:
        """Return the state as a PNG, or as text if the environment draws no pictures."""
        modes = self.spec.render_modes
        if "png" in modes:
            return await self.session.render("png")
        return await self.session.render("text") if "text" in modes else self.session.observation.text

    async def play(self, line: str) -> None:
        """Play one turn as typed, with `SEPARATOR` between actions. Raises Impossible, StarpodError."""
        await self.step([parse(part.strip(), self.spec) for part in line.split(SEPARATOR)])

    async def step(self, actions: Sequence[Action], by: str = YOU) -> None:
        if self.session.done:
            raise Impossible("The episode is over.")
        snapshot = await self.session.snapshot() if self.spec.capabilities.snapshot else None
        observation = self.session.observation.text
        start = perf_counter()
        transition = await self.session.step(list(actions))
        stepping = perf_counter() - start
        texts = [text_of(action) for action in actions]
        text = f" {SEPARATOR} ".join(texts)
        record = Turn(fresh=not self.turns, observation=observation, text=text, actions=texts, stepping=stepping)
        record.parts = {"environment": transition.reward}
        record.take(transition)
        self.episode.turns.append(record)
        self.episode.take(transition)
        self.episode.final_observation = transition.observation.text
        self.note(by, snapshot)

    async def go_on(self, agent: Agent, by: str) -> None:
        """Let an agent continue in the session itself, to the end of the episode or for `MOST_TURNS` turns.

        Raises Impossible if the agent fails (its earlier turns are kept), and AgentRefused.
        """
        for _ in range(MOST_TURNS):
            if self.session.done:
                break
            snapshot = await self.session.snapshot() if self.spec.capabilities.snapshot else None
            await play(agent, self.session, episode=self.episode, turns=1)
            end = self.episode.end
            if not self.session.done:  # the agent stopped, but another one may continue
                self.episode.end, self.episode.success = "", None
            if end == "failed":
                del self.episode.turns[len(self.turns) :]
                raise Impossible(f"It could not continue: {self.episode.error}")
            if len(self.episode.turns) == len(self.turns):
                break  # the agent had no action
            self.note(by, snapshot)

    def note(self, by: str, snapshot: Snapshot | None) -> None:
        """Add the last turn of the episode's record to the turns that the page shows."""
        turn = self.episode.turns[-1]
        self.success = self.episode.success
        self.turns.append(
            GameTurn(by, turn.actions, turn.observation, turn.own_reward, ", ".join(remarks(turn)), snapshot)
        )


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
        self._games: OrderedDict[str, Game] = OrderedDict()
        self._frames: OrderedDict[str, list[bytes]] = OrderedDict()
        self._drawing = asyncio.Lock()
        self._steps: dict[str, deque[float]] = {}

    @property
    def address(self) -> str:
        """Address of the servers. Raises Unreachable if it is not known yet."""
        self._address = self._address or self._find()
        if not self._address:
            raise Unreachable("The servers of the run are not up yet: it has only begun.")
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

    def all(self) -> list[Game]:
        """Return the open games, most recently used first."""
        return list(reversed(self._games.values()))

    def get(self, name: str) -> Game:
        """Return a game and mark it as used. Raises Impossible if it was closed."""
        if name not in self._games:
            raise Impossible("This session has ended: it was closed, or the site was restarted.")
        self._games.move_to_end(name)
        return self._games[name]

    async def open(
        self,
        environment: str,
        *,
        options: Mapping[str, Any],
        seed: int | None = None,
    ) -> Game:
        """Open a new game, whose number of turns is unlimited. Raises Impossible, StarpodError."""
        spec = await self.spec(environment)
        (session,) = await (await self.fleet()).open(
            environment,
            seed=seed,
            options=options or None,
            want=_want(spec),
            limits=UNLIMITED,
            lease_seconds=LEASE_SECONDS,
        )
        return _begin(session, spec, options)

    async def adopt(self, session: Session) -> Game:
        """Return a new game for a copy of another client's session. Raises Impossible, StarpodError."""
        spec = await self.spec(session.environment_id)
        task = Task(spec.id, limits=session.limits)
        game = Game(secrets.token_urlsafe(9), session, spec, task, Episode.begin(session, 0), copied=True)
        return await self.keep(game)

    async def keep(self, game: Game) -> Game:
        """Make a game available by its id, and close the least recently used ones beyond `MOST_GAMES`."""
        self._games[game.id] = game
        while len(self._games) > MOST_GAMES:
            _, oldest_game = self._games.popitem(last=False)
            await close([oldest_game.session])
        return game

    async def forget(self, game: Game) -> None:
        self._games.pop(game.id, None)
        await close([game.session])

    async def undo(self, game: Game) -> None:
        """Take the last turn back. Raises Impossible, StarpodError."""
        if not game.turns:
            raise Impossible("There is no turn to take back.")
        first = game.turns[0].snapshot
        if game.copied and first is None:
            raise Impossible(f"{game.spec.id} has no snapshots: turns of another's session cannot be taken back.")
        old_session = game.session
        snapshots = {number: turn.snapshot for number, turn in enumerate(game.turns) if turn.snapshot is not None}
        path = game.task.path(game.episode, reseedings=game.reseedings, snapshots=snapshots)
        if game.copied and first is not None:
            path = replace(path, origin=first)
        game.session = await self._reach(path, len(game.turns) - 1, old_session.want)
        game.turns.pop()
        game.episode.turns.pop()
        game.reseedings = {at: each for at, each in game.reseedings.items() if at <= len(game.turns)}
        game.episode.end, game.episode.final_observation = "", game.session.observation.text
        game.episode.success = None
        game.success = None
        await close([old_session])

    async def fork(self, game: Game) -> Game:
        """Return a copy of the game with the same random state. Raises StarpodError."""
        (session,) = await game.session.fork()
        episode, turns = copy.deepcopy(game.episode), list(game.turns)
        lock, name = asyncio.Lock(), secrets.token_urlsafe(9)
        return await self.keep(replace(game, id=name, session=session, episode=episode, turns=turns, lock=lock))

    async def replay(
        self,
        episode: Episode,
        task: Task,
        turns: int,
        *,
        reseedings: Reseedings | None = None,
        by: Callable[[int], str] = lambda number: "the episode",
    ) -> Game:
        """Open a game in the state before a turn of an episode. The caller keeps or closes it.

        Args:
            episode: the record of the episode.
            task: its task.
            turns: index of the turn.
            reseedings: the reseedings of the dynamics since the start.
            by: function that returns who played the turn with a given number.

        Raises:
            Impossible: the server's observations differ from the episode's.
        """
        spec = await self.spec(task.environment)
        reseedings = reseedings or {}
        session = await self._reach(_path(episode, task, reseedings), turns, _want(spec))
        game = _begin(session, spec, task.options, episode.task)
        game.episode.dynamics_seed, game.episode.begun_at = episode.dynamics_seed, 0
        game.reseedings = {at: each for at, each in reseedings.items() if at <= turns}
        for number, turn in enumerate(episode.turns[:turns]):
            record = Turn(fresh=not number, parts={"environment": turn.own_reward})
            for name in REPLAYED:
                setattr(record, name, getattr(turn, name))
            game.episode.turns.append(record)
            game.note(by(number), None)
        game.episode.final_observation = session.observation.text
        if session.done:
            game.episode.end, game.episode.success = episode.end, episode.success
            game.success = episode.success
        return game

    async def _reach(self, path: EpisodePath, turn: int, want: Want) -> Session:
        try:
            return await (await self.fleet()).reach(path, turn, want=want, lease_seconds=LEASE_SECONDS)
        except ReplayDiverged as error:
            raise Impossible(str(error)) from None

    async def frames(self, key: str, episode: Episode, task: Task, reseedings: Reseedings | None = None) -> list[bytes]:
        """Return a picture of each state of an episode, first and last included, drawn during a replay.

        key: key under which the pictures are cached. Raises Impossible if there are no pictures, or if the replay
        differs.
        """
        async with self._drawing:  # a page requests all pictures at once, and one replay draws them
            if key not in self._frames:
                if "png" not in (await self.spec(task.environment)).render_modes:
                    raise Impossible(f"{task.environment} draws no pictures.")
                try:
                    self._frames[key] = await draw_path(await self.fleet(), _path(episode, task, reseedings or {}))
                except ReplayDiverged as error:
                    raise Impossible(str(error)) from None
            while len(self._frames) > MOST_FRAMES:
                self._frames.popitem(last=False)
            return self._frames[key]


def _want(spec: pb.EnvironmentSpec) -> Want:
    """Return the optional fields of observations that the page of a game shows."""
    can = spec.capabilities
    return Want(valid_actions=can.valid_actions, expert_action=can.expert_action, score=can.score)


def _begin(session: Session, spec: pb.EnvironmentSpec, options: Mapping[str, Any], name: str = "") -> Game:
    """Return a game without turns. name: name of the task of a run."""
    task = Task(spec.id, options=dict(options), limits=session.limits, name=name)
    return Game(secrets.token_urlsafe(9), session, spec, task, Episode.begin(session, 0, name))


def _path(episode: Episode, task: Task, reseedings: Reseedings) -> EpisodePath:
    if episode.begun_at:
        raise Impossible("The environment's expert began this episode, but its moves are not in the record.")
    return replace(task, limits=task.limits or UNLIMITED).path(episode, reseedings=reseedings)


def remarks(turn: Turn) -> list[str]:
    """Return remarks on what went wrong in a turn, such as "cut by the token limit"."""
    texts = [] if turn.well_formed else ["ill-formed"]
    texts += ["cut by the token limit"] if turn.finish == "length" else []
    is_single = len(turn.actions) == 1
    if not turn.actions:
        texts.append("no action")
    elif turn.valid < len(turn.actions):
        texts.append("invalid" if is_single else f"{turn.valid} of {len(turn.actions)} actions valid")
    elif turn.effective < turn.executed:
        texts.append("changed nothing" if is_single else f"{turn.effective} of {turn.executed} had an effect")
    return texts


async def close(sessions: Sequence[Session]) -> None:
    """Close sessions. If a server does not answer, its sessions end when their lease expires."""
    results = await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, StarpodError):
            raise result


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


def parse(text: str, spec: pb.EnvironmentSpec) -> Action:
    """Parse a typed action: a tool's name with its arguments as JSON, or else text. Raises Impossible."""
    name, _, remainder = text.partition(" ")
    if not any(tool.name == name for tool in spec.action_space.tools):
        return text
    try:
        arguments = json.loads(remainder.strip() or "{}")
    except ValueError as error:
        raise Impossible(f"The arguments of {name} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise Impossible(f"The arguments of {name} are not a JSON object.")
    return ToolCall(name, arguments)


def text_of(action: Action) -> str:
    """Write an action as `parse` reads it."""
    if isinstance(action, ToolCall):
        return f"{action.name} {json.dumps(dict(action.arguments))}"
    return action if isinstance(action, str) else str(action)
