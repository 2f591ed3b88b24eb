"""Search for the episodes of a group, during play or after it.

Branches that score a candidate have their own dynamics seeds, so the search does not see the transitions that the kept
episode will get.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from itertools import chain
from statistics import fmean

from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.group import Group
from starpod.trainer.rollout.branches import Brancher, Line, adopt
from starpod.trainer.rollout.config import (
    BeamConfig,
    BestOfConfig,
    LookaheadConfig,
    PivotsConfig,
    SearchConfig,
    TreeConfig,
    ValuesConfig,
)
from starpod.trainer.rollout.pivots import Recoverability
from starpod.trainer.rollout.play import together
from starpod.trainer.rollout.selection import weigh

WON, LOST = 2.0, -1.0
"""Scores of won and lost episodes. Unfinished episodes have scores in [0, 1], which lie between these two."""


class Search:
    """Finds groups of episodes with the configured strategy.

    Args:
        pivots: Model of recoverable states, fitted to past branches. Searches of several environments share it.
    """

    def __init__(self, config: SearchConfig, pivots: Recoverability | None = None) -> None:
        self.config = config
        self.pivots = pivots or Recoverability()

    async def find(self, brancher: Brancher, size: int) -> Group:
        """Return a group of `size` episodes, or fewer if some failed, and close all sessions.

        Errors of `Fleet.open`, AgentRefused and UserCodeError are raised.
        """
        try:
            match self.config:
                case BestOfConfig() as config:
                    group = await self._best_of(config, brancher, size)
                case BeamConfig() as config:
                    group = await Beams(config).find(brancher, size)
                case PivotsConfig() as config:
                    group = await self._pivots(config, brancher, size)
                case ValuesConfig() as config:
                    group = await self._values(config, brancher, size)
                case TreeConfig() as config:
                    group = await self._tree(config, brancher, size)
                case _:
                    raise AssertionError(self.config.strategy)
        finally:
            await brancher.close()
        group.spent = brancher.spent
        return group

    async def _best_of(self, config: BestOfConfig, brancher: Brancher, size: int) -> Group:
        naive = round(config.naive * size)
        lines = await brancher.open(naive + config.width * (size - naive))
        await together(brancher.play(line) for line in lines)
        searched_group = _group(brancher, lines[naive:])
        group = _group(brancher, lines[:naive])
        group.episodes += best(searched_group.episodes, size - naive)
        group.failed += searched_group.failed
        group.naive = naive
        return group

    async def _pivots(self, config: PivotsConfig, brancher: Brancher, size: int) -> Group:
        """Branch one state of each unsuccessful episode, with at most `most_branches` branches in all (DEEP-GRPO)."""
        width = config.width
        lines = await brancher.open(size)
        for line in lines:
            brancher.keep_snapshots(line)
        await together(brancher.play(line) for line in lines)
        group = _group(brancher, lines)
        # Skip one-turn episodes: their only state is the start state, which the group already samples from.
        lost_lines = [line for line in lines if unsuccessful(line.episode) and len(line.episode.turns) > 1]
        calls = []
        for line in lost_lines[: config.most_branches // width]:
            member, count = line.episode.member, len(line.episode.turns)
            chances = self.pivots.chances([turn / count for turn in range(1, count)], config.gamma)
            rng = random.Random(derive(brancher.seed, "pivot", brancher.group, member))
            (turn,) = rng.choices(range(1, count), chances)
            calls.append(brancher.grow(line, turn, range(size + member * width, size + (member + 1) * width)))
        branches = list(chain.from_iterable(await together(calls)))
        await together(brancher.play(branch) for branch in branches)
        branch_group = _group(brancher, branches)
        for episode in branch_group.episodes:
            episode.apart = True
        group.branches, group.failed = branch_group.episodes, group.failed + branch_group.failed
        return group

    async def _values(self, config: ValuesConfig, brancher: Brancher, size: int) -> Group:
        """Estimate each state's value as the mean return of its continuations (VinePPO).

        The value of an episode's start state is the mean return of the other episodes of the group.
        """
        lines = await brancher.open(size)
        for line in lines:
            brancher.keep_snapshots(line)
        await together(brancher.play(line) for line in lines)
        group = _group(brancher, lines)
        returns = [episode.total_reward for episode in group.episodes]
        for episode, value in zip(group.episodes, returns, strict=True):
            for first_turn in episode.turns[:1]:
                first_turn.value = (sum(returns) - value) / (len(returns) - 1) if len(returns) > 1 else value
        states = [
            (line, turn) for line in lines if not line.episode.failed for turn in range(1, len(line.episode.turns))
        ]
        await together(_value(brancher, line, turn, config.width) for line, turn in states)
        return group

    async def _tree(self, config: TreeConfig, brancher: Brancher, size: int) -> Group:
        """Grow `width` trees by one branch at a time, each from a random state of its tree (Tree-GRPO)."""
        trees = [[line] for line in await brancher.open(min(config.width, size))]
        new_lines = lines = list(chain.from_iterable(trees))
        while new_lines:
            for line in new_lines:
                brancher.keep_snapshots(line)
            await together(brancher.play(line) for line in new_lines)
            calls: list[Awaitable[list[Line]]] = []
            for tree in trees[: size - len(lines)]:
                # The state before a branch's first turn is its parent's.
                states = [
                    (line, turn)
                    for line in tree
                    for turn in range(line.episode.shared + 1, len(line.episode.turns))
                    if not line.episode.failed
                ]
                number = len(lines) + len(calls)
                rng = random.Random(derive(brancher.seed, "tree", brancher.group, number))
                calls.append(brancher.grow(*rng.choice(states or [(tree[0], 0)]), [number]))
            new_lines = list(chain.from_iterable(await together(calls)))
            for tree, branch in zip(trees, new_lines, strict=False):
                tree.append(branch)
            lines = [*lines, *new_lines]
        return _group(brancher, lines)


async def _value(brancher: Brancher, line: Line, turn: int, width: int) -> None:
    members = [derive(line.episode.member, "value", turn, number) for number in range(width)]
    branches = await brancher.grow(line, turn, members)
    await together(brancher.play(branch) for branch in branches)
    values = [sum(turn.reward for turn in branch.episode.own_turns) for branch in branches if not branch.episode.failed]
    # If all continuations failed, the rest of the episode itself is the only sample of the value.
    own_value = sum(turn.reward for turn in line.episode.turns[turn:])
    line.episode.turns[turn].value = fmean(values or [own_value])


class Beams:
    """Beam search during play (TSR): after each turn, the `keep` best replies of all episodes of a beam are kept."""

    def __init__(self, config: BeamConfig) -> None:
        self.config = config

    async def find(self, brancher: Brancher, size: int) -> Group:
        """Return a group of `size` episodes, or fewer if some failed."""
        naive, keep = round(self.config.naive * size), self.config.keep
        widths = [min(keep, size - first) for first in range(naive, size, keep)]
        lines = await brancher.open(naive + len(widths))

        async def play_alone(line: Line) -> list[Line]:
            return [await brancher.play(line)]

        beams = (self._beam(brancher, *beam) for beam in zip(lines[naive:], widths, strict=True))
        ended = await together([*map(play_alone, lines[:naive]), *beams])
        group = _group(brancher, lines[:naive])
        ended_lines = list(chain.from_iterable(ended[naive:]))
        adopt([line.episode for line in ended_lines], naive, brancher.rewards)
        searched_group = _group(brancher, ended_lines)
        group.episodes, group.failed = group.episodes + searched_group.episodes, group.failed + searched_group.failed
        group.naive = naive
        for line in ended_lines:
            brancher.watch(line.episode)
        return group

    async def _beam(self, brancher: Brancher, first: Line, keep: int) -> list[Line]:
        lines, width = [first], self.config.width
        while open_lines := [line for line in lines if not line.over]:
            places = keep - (len(lines) - len(open_lines))
            if len(open_lines) * width <= places:
                # The beam has room for every reply, so nothing needs a score.
                choices: list[tuple[Line, Sequence[Turn | None]]] = [
                    (line, [None] * self.config.width) for line in open_lines
                ]
            else:
                choices = await self._choose(brancher, open_lines, places)
            lines = [line for line in lines if line.over]
            lines += chain.from_iterable(await together(_go_on(brancher, line, replies) for line, replies in choices))
            dropped_lines = [line for line in open_lines if all(line is not chosen_line for chosen_line, _ in choices)]
            await brancher.close([line.session for line in dropped_lines])
            for line in dropped_lines:
                line.agent.close()
        return lines

    async def _choose(
        self, brancher: Brancher, open_lines: Sequence[Line], places: int
    ) -> list[tuple[Line, Sequence[Turn | None]]]:
        """Return the best replies, grouped by the line that they continue.

        If scores are equal, distinct actions come before duplicates. Two lines with the same actions and the same
        state would stay identical to the end.
        """
        tries = await together(self._try(brancher, line) for line in open_lines)
        for replies in tries if self.config.correction == "weight" else ():
            if replies:
                weigh(replies)
        ranking, counts = [], Counter[tuple[float, int, tuple[str, ...]]]()
        for index, replies in enumerate(tries):
            for score, reply in replies:
                key = (score, index, tuple(reply.actions))
                ranking.append((-score, counts[key], index, reply))
                counts[key] += 1
        ranking.sort(key=lambda item: item[:2])
        # A line whose replies all failed is continued without a choice, so that its episode reports the error.
        choices: dict[int, list[Turn | None]] = {index: [None] for index, replies in enumerate(tries) if not replies}
        for *_, index, reply in ranking[: max(places - len(choices), 0)]:
            choices.setdefault(index, []).append(reply)
        return [(open_lines[index], choices[index]) for index in sorted(choices)]

    async def _try(self, brancher: Brancher, line: Line) -> list[tuple[float, Turn]]:
        """Return sampled replies to a line's state with their scores, which are means over `draws` dynamics seeds."""
        member, turn, draws = line.episode.member, len(line.episode.turns), self.config.draws
        members = [
            [derive(member, "try", turn, number, draw) for draw in range(draws)] for number in range(self.config.width)
        ]
        branches = await brancher.grow(line, turn, list(chain.from_iterable(members)))
        depth = self.config.depth if isinstance(self.config, LookaheadConfig) else 0
        calls = []
        for number in range(self.config.width):
            branch, *copies = branches[number * draws : (number + 1) * draws]
            calls.append(self._score(brancher, branch, copies, depth))
        results = await together(calls)
        return [result for result in results if result is not None]

    async def _score(
        self, brancher: Brancher, line: Line, copies: Sequence[Line], depth: int
    ) -> tuple[float, Turn] | None:
        """Sample and play a reply to the line's state. Return (mean score, reply); None if this fails.

        copies: copies of the line with different dynamics seeds, which replay the reply. Scores are averaged over all.
        """
        index = len(line.episode.turns)
        await brancher.play(line, 1)
        if len(line.episode.turns) == index or line.episode.failed:
            return None
        reply = line.episode.turns[index]
        await together(brancher.play(copy, 1, [reply]) for copy in copies)
        scores = await together(
            self._state_score(brancher, copy, depth) for copy in (line, *copies) if not copy.episode.failed
        )
        for copy in (line, *copies):
            if not copy.over:
                copy.agent.close()
        await brancher.close([copy.session for copy in (line, *copies) if not copy.over])
        return fmean(scores), reply

    async def _state_score(self, brancher: Brancher, line: Line, depth: int) -> float:
        """Return the score of a line's state; if `depth` > 0, the best score among the states `depth` turns later."""
        episode = line.episode
        if self.config.score == "reward" and (line.over or not depth):
            return episode.own_return
        if line.over and episode.success is not None:
            return WON if episode.success else LOST
        if line.over or not depth:
            score = line.session.observation.score
            return LOST if score is None else score
        member, turn = episode.member, len(episode.turns)
        members = [derive(member, "below", turn, number) for number in range(self.config.width)]
        branches = await brancher.grow(line, turn, members)
        results = await together(self._score(brancher, branch, (), depth - 1) for branch in branches)
        return max((score for score, _ in (result for result in results if result is not None)), default=LOST)


def best(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return the `count` episodes with the highest returns, in their original order."""
    top_episodes = sorted(episodes, key=lambda episode: -episode.total_reward)[:count]
    return [episode for episode in episodes if any(episode is candidate for candidate in top_episodes)]


def unsuccessful(episode: Episode) -> bool:
    """Return whether the episode missed its goal. If success is unknown, a return of at most 0 counts as a miss."""
    if episode.failed:
        return False
    return episode.own_return <= 0 if episode.success is None else not episode.success


async def _go_on(brancher: Brancher, line: Line, replies: Sequence[Turn | None]) -> list[Line]:
    """Play one turn with each reply: the first one on the line, the others on new branches. None samples a reply."""
    member, turn = line.episode.member, len(line.episode.turns)
    members = [derive(member, "line", turn, number) for number in range(1, len(replies))]
    lines = [line, *(await brancher.grow(line, turn, members) if members else ())]
    pairs = list(zip(lines, replies, strict=True))
    await together(brancher.play(branch, 1, [] if reply is None else [reply]) for branch, reply in pairs)
    for branch, reply in pairs:
        if reply is not None and len(branch.episode.turns) > turn:
            branch.episode.turns[turn].weight = reply.weight
    return lines


def _group(brancher: Brancher, lines: Sequence[Line]) -> Group:
    episodes = [line.episode for line in lines]
    return Group(
        brancher.group,
        [episode for episode in episodes if not episode.failed],
        [episode for episode in episodes if episode.failed],
    )
