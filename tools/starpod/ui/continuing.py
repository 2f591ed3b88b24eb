"""Continuations: policies play on from a state, in its session or in forks of it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starpod.client import EpisodePath, PathTurn, Reseeding
from starpod.remote.game import Impossible
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.evaluation.statistics import wilson_interval
from starpod.trainer.rollout.play import play
from starpod.ui.games import Games, LiveGame
from starpod.ui.policies import SitePolicies

COUNTS = (4, 8, 16, 32)
"""Numbers of continuations that a visitor can choose from."""
MOST_TREES = 500
"""Maximum number of sets of continuations (Branches) that are kept. The oldest are dropped first."""

Watch = Callable[[Episode], None]


@dataclass(frozen=True, slots=True)
class PlayedBranch:
    """A continuation of an episode or game by a policy."""

    episode: Episode
    """Record from the start of the episode, including the turns before the continuation."""
    turn: int
    """Number of the episode's turns before the continuation."""
    path: EpisodePath

    @property
    def later(self) -> Sequence[Turn]:
        """Turns of the continuation itself."""
        return self.episode.turns[self.turn :]

    @property
    def actions(self) -> list[str]:
        """Actions of each turn of the continuation, joined by spaces."""
        return [" ".join(turn.actions) for turn in self.later]

    @property
    def value(self) -> float:
        """Sum of the continuation's rewards."""
        return sum(turn.own_reward for turn in self.later)

    @property
    def success(self) -> bool | None:
        return self.episode.success


@dataclass(frozen=True, slots=True)
class Branches:
    """Continuations from one state."""

    id: str
    policy: str
    """Description of the policy for readers, such as "random actions"."""
    turn: int
    """Number of the episode's turns before the state."""
    game: LiveGame
    """Game that was forked, or in which the episode was replayed."""
    lines: list[PlayedBranch]

    @property
    def solved(self) -> int:
        return sum(line.success is True for line in self.lines)

    @property
    def share(self) -> float:
        return self.solved / len(self.lines) if self.lines else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.solved, len(self.lines))


class Continuing:
    """The finished continuations of the site, and what plays them."""

    def __init__(self, games: Games, policies: SitePolicies) -> None:
        self.games = games
        self.policies = policies
        self._trees: OrderedDict[str, Branches] = OrderedDict()

    async def close(self) -> None:
        await self.policies.close()
        await self.games.close()

    def of(self, game: LiveGame) -> list[Branches]:
        """Return the continuations that were forked from a game, oldest first."""
        return [tree for tree in self._trees.values() if tree.game is game]

    def get(self, name: str, number: int) -> tuple[Branches, PlayedBranch]:
        """Return one continuation and the set that it belongs to. Raises Impossible if it is no longer kept."""
        tree = self._trees.get(name)
        if tree is None or number >= len(tree.lines):
            raise Impossible("This continuation is no longer kept: try again from the episode or the session.")
        return tree, tree.lines[number]

    async def open(self, name: str, number: int, turns: int) -> LiveGame:
        """Open a game in the state of a continuation after `turns` turns of its episode.

        Args:
            name: id of the set that contains the continuation (`Branches.id`).
            number: index of the continuation in the set.
            turns: number of turns from the episode's start, including those before the continuation.

        Raises:
            Impossible: the continuation is no longer kept, or its turns cannot be replayed.
            StarpodError: a call failed.
        """
        tree, branch = self.get(name, number)
        game = await self.games.replay(
            branch.episode, branch.path, turns, lambda turn: tree.policy if turn >= tree.turn else "the episode"
        )
        game.origin, game.run = tree.game.origin, tree.game.run
        return game

    # --- continuing a game --------------------------------------------------------------------------------------------

    async def go_on(self, game: LiveGame, policy: str) -> None:
        """Let a policy continue in the game's session itself. Raises Impossible, StarpodError."""
        _check_open(game)
        game.episode.group = _a_group()
        async with self.policies.playing(policy, game.spec, game.run) as make:
            agent = make(game.session, game.episode)
            turn_count = len(game.episode.turns)
            try:
                await game.go_on(agent, self._words(policy, game))
            finally:
                agent.close()
                self.games.note_step_time(game.session.address, game.episode.turns[turn_count:])

    async def branch(self, game: LiveGame, policy: str, count: int, watch: Watch = lambda episode: None) -> Branches:
        """Fork the game's state `count` times, reseed each copy, and let a policy continue in each.

        Args:
            watch: called with each continuation that has ended.

        Raises:
            Impossible: the episode is over, or the environment or the policy cannot do this.
            StarpodError: a call failed.
        """
        _check_open(game)
        if not game.spec.capabilities.fork:
            raise Impossible(f"{game.spec.id} cannot be forked.")
        if policy == "expert" and not game.spec.capabilities.expert_action:
            raise Impossible(f"{game.spec.id} has no expert.")
        seeds = [secrets.randbits(63) for _ in range(count)]  # the server would derive the same ones each time
        copies = await game.session.fork(count, reseed=True, dynamics_seeds=seeds)
        try:
            async with self.policies.playing(policy, game.spec, game.run) as make:
                # Checkpoints seed their sampling with the group number.
                pasts = [replace(game.episode, turns=list(game.episode.turns), group=_a_group()) for _ in copies]
                agents = [make(copy, past) for copy, past in zip(copies, pasts, strict=True)]
                await asyncio.gather(
                    *(
                        play(agent, copy, episode=past, watch=watch)
                        for agent, copy, past in zip(agents, copies, pasts, strict=True)
                    )
                )
        finally:
            await (await self.games.fleet()).close_sessions(copies)
        turn = len(game.turns)
        lines = []
        for past, copy in zip(pasts, copies, strict=True):
            later_turns = [PathTurn(later.actions, later.observation) for later in past.turns[turn:]]
            events = [*game.events, Reseeding(copy.dynamics_seed), *later_turns]
            lines.append(PlayedBranch(past, turn, EpisodePath(game.start, events, past.final_observation or None)))
        return self.keep(self._words(policy, game), game, lines)

    def _words(self, policy: str, game: LiveGame) -> str:
        return self.policies.choices(run=game.run).get(policy, policy)

    def keep(self, words: str, game: LiveGame, lines: list[PlayedBranch]) -> Branches:
        """Store finished continuations as a set. Raises Impossible if one of them failed.

        Args:
            words: description of the policy for readers, such as "random actions".
            lines: the continuations, at least one, all from the same state.
        """
        for line in lines:
            if line.episode.failed:
                raise Impossible(f"A continuation failed: {line.episode.error}")
            self.games.note_step_time(game.session.address, line.later)
        lines = [replace(line, episode=_without_tokens(line)) for line in lines]
        tree = Branches(secrets.token_urlsafe(9), words, lines[0].turn, game, lines)
        self._trees[tree.id] = tree
        while len(self._trees) > MOST_TREES:
            self._trees.popitem(last=False)
        return tree


def _check_open(game: LiveGame) -> None:
    if game.session.done:
        raise Impossible("The episode is over: there is nothing to continue.")


def _without_tokens(branch: PlayedBranch) -> Episode:
    """Return the episode without tokens and pictures, which is enough to show, replay and imitate it."""
    episode = branch.episode
    later_turns = [
        replace(turn, prompt=[], reply=[], logprobs=[], versions=[], spans=[], image=b"", info={})
        for turn in branch.later
    ]
    return replace(episode, turns=[*episode.turns[: branch.turn], *later_turns], tail=[], final_image=b"")


def _a_group() -> int:
    """Return a random group number, so that no two continuations use the same random numbers."""
    return secrets.randbelow(2**31)
