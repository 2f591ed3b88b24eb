"""Live sessions of the site: played by a person, forked from an episode, continued by other policies."""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starpod.client import (
    Action,
    Fleet,
    Limits,
    Session,
    Snapshot,
    StarpodError,
    ToolCall,
    Unreachable,
    Want,
)
from starpod.client.transport import Transport
from starpod.report.tree import Continuation
from starpod.trainer.agents.base import Agent, AgentRefused, Agents, Sampling, Task
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgent
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rollout.play import play
from starpod.trainer.rollout.saved_starts import SavedStart
from starpod.trainer.statistics import wilson_interval
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from starpod.trainer.agents.chat import ChatAgents

MOST_GAMES = 100
"""Sessions that are kept open; the one that was used longest ago is closed for another."""
MOST_EPISODES = 512
"""Continuations that are played for one request."""
MOST_FRAMES = 32
"""Episodes whose pictures are kept."""
POLICIES = {"expert": "the environment's expert", "random": "random actions"}
"""Policies that can go on from any state."""
CHECKPOINT = "checkpoint"
"""The run's own best checkpoint, which goes on with what began as an episode of the run, and is told the turns before
as its own."""
ENDPOINT = "endpoint"
"""The model of an OpenAI-compatible endpoint, which is told the turns before as its own."""
COUNTS = (4, 8, 16, 32)
"""How many continuations can be asked for."""
MOST_TURNS = 100
"""Turns that a policy plays in a session for one request."""
SEPARATOR = "||"
"""Between the actions of one turn."""
PATIENCE = 15.0
LEASE_SECONDS = 3600.0
"""Of a session of the site."""


class NotPossible(Exception):
    """Refusal of something that cannot be done; the message says why. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Played:
    """One turn. by: who played it. before: what was seen. snapshot: of the state before it, where there is one."""

    by: str
    actions: list[str]
    before: str
    reward: float
    remarks: str
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True)
class Branches:
    """Continuations from one state. turn: turns before it."""

    policy: str
    turn: int
    lines: list[Continuation]

    @property
    def solved(self) -> int:
        return sum(line.success is True for line in self.lines)

    @property
    def share(self) -> float:
        return self.solved / len(self.lines) if self.lines else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.solved, len(self.lines))


@dataclass(slots=True)
class Game:
    """A session with its turns. episode: their record. origin: the link of the episode and turn from which it was
    forked. run: the folder of that episode's run. copied: from another's session, whose seeds and turns before are not
    known."""

    id: str
    session: Session
    spec: pb.EnvironmentSpec
    options: Mapping[str, Any]
    episode: Episode
    turns: list[Played] = field(default_factory=list)
    branches: list[Branches] = field(default_factory=list)
    origin: str = ""
    run: Path | None = None
    copied: bool = False
    success: bool | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def choices(self) -> list[str]:
        """Actions that can be offered as buttons."""
        valid = self.session.observation.valid_actions
        listed = [text_of(action) for action in valid] if valid is not None else list(self.spec.action_space.names)
        return list(dict.fromkeys(listed))[:60]

    @property
    def hint(self) -> str:
        """The expert's next action; empty where there is none."""
        action = self.session.observation.expert_action
        return "" if action is None or self.session.done else text_of(action)

    def python(self, address: str) -> str:
        """A program that plays the same turns."""
        given = {"seed": self.session.seed, "dynamics_seed": self.session.dynamics_seed}
        arguments = "".join(f", {name}={value}" for name, value in given.items())
        arguments += f", options={dict(self.options)!r}" if self.options else ""
        turns = "".join(f"        {turn.actions!r},\n" for turn in self.turns if turn.actions)
        return (
            "from starpod.client import SyncFleet\n\n"
            f"with SyncFleet({address!r}) as fleet:\n"
            f"    (session,) = fleet.open({self.spec.id!r}{arguments})\n"
            "    print(session.observation.text)\n"
            f"    for actions in [\n{turns}    ]:\n"
            "        transition = session.step(actions)\n"
            "        print(transition.observation.text, transition.reward)\n"
        )

    def as_start(self) -> SavedStart:
        """The present state, as a start state for training. Raises NotPossible."""
        if self.session.done or not self.turns:
            raise NotPossible("A start state is one in which something was played and the episode goes on.")
        if self.copied:
            raise NotPossible("This is a copy of another's session: what led to its state is not known.")
        if self.spec.action_space.tools:
            raise NotPossible("Policies act in texts, and this environment takes calls of tools.")
        session = self.session
        actions = [action for turn in self.turns for action in turn.actions]
        return SavedStart(
            self.spec.id,
            self.episode.seed,
            self.episode.dynamics_seed,
            actions,
            session.observation.text,
            session.version,
            dict(self.options),
        )

    async def picture(self) -> bytes | str:
        """The state as a PNG, or as text where the environment draws none."""
        modes = self.spec.render_modes
        if "png" in modes:
            return await self.session.render("png")
        return await self.session.render("text") if "text" in modes else self.session.observation.text

    async def play(self, line: str, by: str = "you") -> None:
        """One turn, as typed. Raises NotPossible and StarpodError."""
        actions = [parse(part.strip(), self.spec) for part in line.split(SEPARATOR)]
        await self.step(actions, by)

    async def step(self, actions: Sequence[Action], by: str) -> None:
        if self.session.done:
            raise NotPossible("The episode is over.")
        snapshot = await self.session.snapshot() if self.spec.capabilities.snapshot else None
        before = self.session.observation.text
        transition = await self.session.step(list(actions))
        texts = [text_of(action) for action in actions]
        record = Turn(fresh=not self.turns, observation=before, text=f" {SEPARATOR} ".join(texts), actions=texts)
        record.parts = {"environment": transition.reward}
        record.reward = transition.reward
        record.take(transition)
        self.episode.turns.append(record)
        self.episode.take(transition)
        self.episode.final_observation = transition.observation.text
        self._note(by, snapshot)

    async def go_on(self, agent: Agent, by: str) -> None:
        """Lets an agent play on in the session itself, to the end of the episode or up to `MOST_TURNS` turns.

        Raises NotPossible for what it failed, after the turns that it played, and AgentRefused.
        """
        for _ in range(MOST_TURNS):
            if self.session.done:
                break
            snapshot = await self.session.snapshot() if self.spec.capabilities.snapshot else None
            await play(agent, self.session, episode=self.episode, turns=1)
            ended = self.episode.end
            if not self.session.done:  # it went no further: another may
                self.episode.end, self.episode.success = "", None
            if ended == "failed":
                del self.episode.turns[len(self.turns) :]
                raise NotPossible(f"It could not play on: {self.episode.error}")
            if len(self.episode.turns) == len(self.turns):
                break  # it knows no move
            self._note(by, snapshot)

    def _note(self, by: str, snapshot: Snapshot | None) -> None:
        """Shows the last turn of the record."""
        last = self.episode.turns[-1]
        self.success = self.episode.success
        reward = last.parts.get("environment", last.reward)
        self.turns.append(Played(by, last.actions, last.observation, reward, ", ".join(remarks(last)), snapshot))


class Games:
    """The fleet and the sessions that the site holds on it. It connects when it is first needed.

    endpoint: URL and model of an OpenAI-compatible endpoint that can play on; None: there is none.
    """

    def __init__(self, address: str, access: Transport, endpoint: tuple[str, str] | None = None) -> None:
        self.address = address
        self._access = access
        self._endpoint = endpoint
        self._chat: ChatAgents | None = None
        self._fleet: Fleet | None = None
        self._connecting = asyncio.Lock()
        self._games: OrderedDict[str, Game] = OrderedDict()
        self._frames: OrderedDict[str, list[bytes]] = OrderedDict()
        self._drawing = asyncio.Lock()
        self._policy: tuple[tuple[Path, str], Agents] | None = None

    def policies(self, spec: pb.EnvironmentSpec | None = None, *, checkpoint: bool = False) -> dict[str, str]:
        """Policies that can go on, by name, in words. spec: of the environment. checkpoint: of a run's episode."""
        found = dict(POLICIES)
        if spec is not None and not spec.capabilities.expert_action:
            del found["expert"]
        if self._endpoint:
            found[ENDPOINT] = f"{self._endpoint[1]} at the endpoint"
        if checkpoint:
            found[CHECKPOINT] = "the run's best checkpoint"
        return found

    async def fleet(self) -> Fleet:
        """Raises StarpodError where no server can be used."""
        async with self._connecting:
            if self._fleet is None:
                fleet = Fleet(self.address, token=self._access.token, tls=self._access.tls, patience=PATIENCE)
                await fleet.start()
                self._fleet = fleet
            return self._fleet

    async def close(self) -> None:
        if self._policy is not None:
            await self._policy[1].close()
        if self._chat is not None:
            await self._chat.close()
        if self._fleet is not None:
            await self._fleet.close()

    async def spec(self, environment: str) -> pb.EnvironmentSpec:
        """The newest version. Raises NotPossible where no server hosts it, StarpodError."""
        specs = await (await self.fleet()).describe()
        if not specs:
            raise Unreachable(f"No server at {self.address} can be reached now: is it still running?")
        for spec in specs:
            if spec.id == environment:
                return spec
        raise NotPossible(f"{self.address} does not host {environment}.")

    def all(self) -> list[Game]:
        """Open games, the latest first."""
        return list(reversed(self._games.values()))

    def get(self, name: str) -> Game:
        """Raises NotPossible for a game that is no longer there."""
        if name not in self._games:
            raise NotPossible("This session has ended: it was closed, or the site was started again.")
        self._games.move_to_end(name)
        return self._games[name]

    async def open(
        self,
        environment: str,
        *,
        options: Mapping[str, Any],
        seed: int | None = None,
        dynamics_seed: int | None = None,
        limits: Limits | None = None,
        version: str = "",
    ) -> Game:
        """A new game. Without limits a person may take any number of turns. Raises NotPossible, StarpodError."""
        spec = await self.spec(environment)
        can = spec.capabilities
        want = Want(valid_actions=can.valid_actions, expert_action=can.expert_action, score=can.score)
        (session,) = await (await self.fleet()).open(
            environment,
            seed=seed,
            dynamics_seed=dynamics_seed,
            options=options or None,
            want=want,
            limits=limits or Limits(max_turns=0, max_actions=0),
            version=version,
            lease_seconds=LEASE_SECONDS,
        )
        return Game(secrets.token_urlsafe(9), session, spec, options, Episode.begin(session, 0))

    async def adopt(self, session: Session) -> Game:
        """A game in a session that was copied from another's. Raises NotPossible, StarpodError."""
        spec = await self.spec(session.environment_id)
        game = Game(secrets.token_urlsafe(9), session, spec, {}, Episode.begin(session, 0), copied=True)
        return await self.keep(game)

    async def keep(self, game: Game) -> Game:
        """Makes it reachable by its id. The oldest is closed where there are too many."""
        self._games[game.id] = game
        while len(self._games) > MOST_GAMES:
            _, oldest = self._games.popitem(last=False)
            await _close([oldest.session])
        return game

    async def forget(self, game: Game) -> None:
        self._games.pop(game.id, None)
        await _close([game.session])

    async def undo(self, game: Game) -> None:
        """Takes the last turn back. Raises NotPossible, StarpodError."""
        if not game.turns:
            raise NotPossible("There is no turn to take back.")
        snapshot = game.turns[-1].snapshot
        if snapshot is None:
            raise NotPossible(f"{game.spec.id} has no snapshots: turns cannot be taken back.")
        before = game.session
        session = await (await self.fleet()).restore(snapshot, want=before.want, lease_seconds=LEASE_SECONDS)
        game.session = session
        game.turns.pop()
        game.episode.turns.pop()
        game.episode.end, game.episode.final_observation = "", session.observation.text
        game.episode.success = None
        game.success = None
        await _close([before])

    async def replay(self, episode: Episode, task: Task, turns: int) -> Game:
        """A game that stands where the episode stood after so many turns. Raises NotPossible where the server shows
        something else than the episode has."""
        if episode.begun_at:
            raise NotPossible("The environment's expert began this episode, and its moves are not in the record.")
        game = await self.open(
            task.environment,
            options=task.options,
            seed=episode.seed,
            dynamics_seed=episode.dynamics_seed,
            limits=task.limits,
            version=f"=={episode.version}" if episode.version else "",
        )
        try:
            for number, turn in enumerate(episode.turns[: turns + 1]):
                _check_shown(game.session, turn, number)
                if number < turns and turn.actions:
                    await game.step(turn.actions, "the episode")
                    for name in ("text", "reply", "logprobs", "versions", "finish"):
                        setattr(game.episode.turns[-1], name, getattr(turn, name))
        except BaseException:
            await _close([game.session])
            raise
        return game

    async def frames(self, key: str, episode: Episode, task: Task) -> list[bytes]:
        """A picture of the state before each turn and of the last one, by replay. key: of the episode, under which they
        are kept. Raises NotPossible where the environment draws none, or the server shows something else."""
        async with self._drawing:  # a page asks for all of them at once
            return await self._draw(key, episode, task)

    async def _draw(self, key: str, episode: Episode, task: Task) -> list[bytes]:
        if key not in self._frames:
            game = await self.replay(episode, task, 0)
            try:
                if "png" not in game.spec.render_modes:
                    raise NotPossible(f"{game.spec.id} draws no pictures.")
                frames = [await game.session.render("png")]
                for number, turn in enumerate(episode.turns):
                    _check_shown(game.session, turn, number)
                    if turn.actions:
                        await game.session.step(turn.actions)
                    frames.append(await game.session.render("png"))
            finally:
                await _close([game.session])
            self._frames[key] = [frame for frame in frames if isinstance(frame, bytes)]
            while len(self._frames) > MOST_FRAMES:
                self._frames.popitem(last=False)
        return self._frames[key]

    async def branch(self, game: Game, policy: str, count: int) -> Branches:
        """Forks the game's state `count` times and lets a policy play on, each with luck of its own.

        Raises NotPossible, StarpodError.
        """
        if game.session.done:
            raise NotPossible("The episode is over: there is nothing to continue.")
        if not game.spec.capabilities.fork:
            raise NotPossible(f"{game.spec.id} cannot be forked.")
        if policy == "expert" and not game.spec.capabilities.expert_action:
            raise NotPossible(f"{game.spec.id} has no expert.")
        copies = await game.session.fork(count, reseed=True)
        try:
            # The number of a group decides what a checkpoint samples.
            pasts = [replace(game.episode, turns=list(game.episode.turns), group=_a_group()) for _ in copies]
            agents = [await self._player(policy, game, copy, past) for copy, past in zip(copies, pasts, strict=True)]
            episodes = await asyncio.gather(
                *(play(agent, copy, episode=past) for agent, copy, past in zip(agents, copies, pasts, strict=True))
            )
        except AgentRefused as error:
            raise NotPossible(f"The policy cannot play on: {error}") from None
        finally:
            await _close(copies)
        return Branches(policy, len(game.turns), [_line(each, len(game.turns)) for each in episodes])

    async def go_on(self, game: Game, policy: str) -> None:
        """Lets a policy play on in the game's session itself. Raises NotPossible, StarpodError."""
        if game.session.done:
            raise NotPossible("The episode is over: there is nothing to continue.")
        game.episode.group = _a_group()
        agent = await self._player(policy, game, game.session, game.episode)
        try:
            await game.go_on(agent, self.policies(checkpoint=True)[policy])
        except AgentRefused as error:
            raise NotPossible(f"The policy cannot play on: {error}") from None
        finally:
            agent.close()

    async def _player(self, policy: str, game: Game, session: Session, past: Episode) -> Agent:
        """An agent that knows the turns before, for the game's session or a copy of it. Raises NotPossible."""
        names = tuple(game.spec.action_space.names)
        if policy not in (ENDPOINT, CHECKPOINT):
            choose, _ = REFERENCES[policy]
            return ReferenceAgent(choose, names, random.Random(f"{session.dynamics_seed}/{past.group}"))
        agents = self._ask() if policy == ENDPOINT else await self._load(game.run)
        agent = agents.agent(session, Task(game.spec.id, actions=names, name=past.task), past.group)
        if type(agent).recall is Agent.recall:
            raise NotPossible("The run plays by a conversation script: its policy cannot be told turns of others.")
        agent.recall(past)
        return agent

    def _ask(self) -> ChatAgents:
        """The model of the endpoint. Raises NotPossible."""
        try:
            from starpod.trainer.agents.chat import ChatAgents  # in the extra `trainer`
        except ImportError as error:
            raise NotPossible(f"The endpoint cannot be asked: the package {error.name} is not installed.") from None
        if self._chat is None:
            assert self._endpoint is not None
            url, model = self._endpoint
            self._chat = ChatAgents(model, base_url=url)
        return self._chat

    async def branch_each_turn(
        self, episode: Episode, task: Task, policy: str, count: int, run: Path
    ) -> list[Branches]:
        """Continuations from the state before each turn of an episode: which turn lost it?

        run: the folder of the run, for its checkpoint, which samples under the luck that the episode had.
        """
        if len(episode.turns) * count > MOST_EPISODES:
            raise NotPossible(
                f"{len(episode.turns)} turns with {count} continuations each are more than {MOST_EPISODES} episodes: "
                "ask for fewer."
            )
        if policy == CHECKPOINT:
            return await self._sample_each_turn(episode, task, count, run)
        game = await self.replay(episode, task, 0)
        found = []
        try:
            for turn in episode.turns:
                found.append(await self.branch(game, policy, count))
                if turn.actions:
                    await game.step(turn.actions, "the episode")
                if game.session.done:
                    break
        finally:
            await _close([game.session])
        return found

    async def _sample_each_turn(self, episode: Episode, task: Task, count: int, run: Path) -> list[Branches]:
        spec = await self.spec(task.environment)
        task = replace(task, actions=tuple(spec.action_space.names))
        agents = await self._load(run)
        return [await self._sample(episode, task, turn, count, agents) for turn in range(len(episode.turns))]

    async def _sample(self, episode: Episode, task: Task, turns: int, count: int, agents: Agents) -> Branches:
        """Continuations by the checkpoint, which is told the replies of the turns before as its own."""
        sessions = await (await self.fleet()).open(
            task.environment,
            seed=episode.seed,
            dynamics_seed=episode.dynamics_seed,
            count=count,
            options=task.options or None,
            want=agents.want,
            limits=task.limits,
            version=f"=={episode.version}" if episode.version else "",
        )
        past = episode.turns[:turns]
        # The number of a group decides what is sampled.
        groups = [1 + turns * MOST_EPISODES + number for number in range(count)]
        try:
            episodes = await asyncio.gather(
                *(
                    play(agents.agent(session, task, group), session, group=group, past=past)
                    for session, group in zip(sessions, groups, strict=True)
                )
            )
        finally:
            await _close(sessions)
        if any([turn.reply for turn in each.turns[:turns]] != [turn.reply for turn in past] for each in episodes):
            raise NotPossible(f"The checkpoint is asked other prompts than the episode had before turn {turns + 1}.")
        return Branches(CHECKPOINT, turns, [_line(each, turns) for each in episodes])

    async def _load(self, run: Path | None) -> Agents:
        """The run's best checkpoint, kept until another is asked for. Raises NotPossible."""
        if run is None:
            raise NotPossible("This session does not come from an episode of a run, whose checkpoint could play on.")
        try:
            best = (run / "checkpoints" / "best").read_text(encoding="utf-8")
        except OSError:
            best = ""
        if self._policy is None or self._policy[0] != (run, best):
            try:
                from starpod.trainer.agents.pretrained import PretrainedAgents  # with torch, in the extra `trainer`

                agents = await asyncio.to_thread(PretrainedAgents, str(run), Sampling())
            except (ImportError, AgentRefused) as error:
                raise NotPossible(f"The checkpoint cannot be loaded here: {error}") from None
            if self._policy is not None:
                await self._policy[1].close()
            self._policy = ((run, best), agents)
        return self._policy[1]


def _check_shown(session: Session, turn: Turn, number: int) -> None:
    """Raises NotPossible unless the session shows what the episode had before its turn `number`, counted from 0."""
    if session.observation.text != turn.observation:
        raise NotPossible(
            f"At turn {number + 1} the server shows something else than the episode has: other options, another "
            "version, or an environment whose luck does not repeat."
        )


def _a_group() -> int:
    """A number that no other group has."""
    return secrets.randbelow(2**31)


def remarks(turn: Turn) -> list[str]:
    """Remarks on a turn that went wrong, in words."""
    found = [] if turn.well_formed else ["ill-formed"]
    found += ["cut by the token limit"] if turn.finish == "length" else []
    alone = len(turn.actions) == 1
    if not turn.actions:
        found.append("no action")
    elif turn.valid < len(turn.actions):
        found.append("invalid" if alone else f"{turn.valid} of {len(turn.actions)} actions valid")
    elif turn.effective < turn.executed:
        found.append("changed nothing" if alone else f"{turn.effective} of {turn.executed} had an effect")
    return found


def _line(episode: Episode, turns: int) -> Continuation:
    """What was played after so many turns. Raises NotPossible."""
    if episode.failed:
        raise NotPossible(f"A continuation failed: {episode.error}")
    later = episode.turns[turns:]
    own = sum(turn.parts.get("environment", turn.reward) for turn in later)
    return Continuation([" ".join(turn.actions) for turn in later], own, episode.success)


async def _close(sessions: Sequence[Session]) -> None:
    results = await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, StarpodError):
            raise result


def parse(text: str, spec: pb.EnvironmentSpec) -> Action:
    """A typed action: the name of a tool and its arguments as JSON, or text. Raises NotPossible."""
    word, _, rest = text.partition(" ")
    if not any(tool.name == word for tool in spec.action_space.tools):
        return text
    try:
        arguments = json.loads(rest.strip() or "{}")
    except ValueError as error:
        raise NotPossible(f"The arguments of {word} are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise NotPossible(f"The arguments of {word} are no JSON object.")
    return ToolCall(word, arguments)


def text_of(action: Action) -> str:
    """An action as `parse` reads it."""
    if isinstance(action, ToolCall):
        return f"{action.name} {json.dumps(dict(action.arguments))}"
    return action if isinstance(action, str) else str(action)
