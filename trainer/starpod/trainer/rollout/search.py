"""Search for the episodes of a group, during play or after it.

Branches that score a candidate have their own dynamics seeds, so the search does not see the transitions that the kept
episode will get.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from itertools import chain
from statistics import fmean
from typing import TypeVar

from starpod.trainer.data.episode import Episode, Group, Turn
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
from starpod.trainer.rollout.selection import weigh
from starpod.trainer.seeds import derive

Result = TypeVar("Result")
WON, LOST = 2.0, -1.0
"""Scores of won and lost episodes. They are above and below the scores of unfinished episodes, which are in [0, 1]."""


class Search:
    """Finds groups of episodes with the configured strategy.

    Args:
        config: Strategy and its options.
        pivots: Model of recoverable states, fitted to past branches. Searches of several environments share one.
    """

    def __init__(self, config: SearchConfig, pivots: Recoverability | None = None) -> None:
        self.config = config
        self.pivots = pivots or Recoverability()

    async def find(self, brancher: Brancher, size: int) -> Group:
        """Return a group of `size` episodes, or fewer if some failed, and close all sessions.

        Errors of `Fleet.open`, AgentRefused and RewardError are raised.
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
        await _all(brancher.play(line) for line in lines)
        searched = _group(brancher, lines[naive:])
        group = _group(brancher, lines[:naive])
        group.episodes += best(searched.episodes, size - naive)
        group.failed += searched.failed
        return group

    async def _pivots(self, config: PivotsConfig, brancher: Brancher, size: int) -> Group:
        """Branch one state of each unsuccessful episode, up to `most_branches` branches (DEEP-GRPO)."""
        width = config.width
        lines = await brancher.open(size)
        for line in lines:
            brancher.keep_snapshots(line)
        await _all(brancher.play(line) for line in lines)
        group = _group(brancher, lines)
        # Skip one-turn episodes: their only state is the start state, which the group already samples from.
        lost = [line for line in lines if unsuccessful(line.episode) and len(line.episode.turns) > 1]
        grown = []
        for line in lost[: config.most_branches // width]:
            member, count = line.episode.member, len(line.episode.turns)
            chances = self.pivots.chances([turn / count for turn in range(1, count)], config.gamma)
            rng = random.Random(derive(brancher.seed, "pivot", brancher.group, member))
            (turn,) = rng.choices(range(1, count), chances)
            grown.append(brancher.grow(line, turn, range(size + member * width, size + (member + 1) * width)))
        branches = list(chain.from_iterable(await _all(grown)))
        await _all(brancher.play(branch) for branch in branches)
        found = _group(brancher, branches)
        group.branches, group.failed = found.episodes, group.failed + found.failed
        return group

    async def _values(self, config: ValuesConfig, brancher: Brancher, size: int) -> Group:
        """Estimate each state's value as the mean return of its continuations (VinePPO). The value of the start state
        is the mean return of the other members."""
        lines = await brancher.open(size)
        for line in lines:
            brancher.keep_snapshots(line)
        await _all(brancher.play(line) for line in lines)
        group = _group(brancher, lines)
        returns = [episode.total_reward for episode in group.episodes]
        for episode, own in zip(group.episodes, returns, strict=True):
            for first in episode.turns[:1]:
                first.value = (sum(returns) - own) / (len(returns) - 1) if len(returns) > 1 else own
        states = [
            (line, turn) for line in lines if not line.episode.failed for turn in range(1, len(line.episode.turns))
        ]
        await _all(_value(brancher, line, turn, config.width) for line, turn in states)
        return group

    async def _tree(self, config: TreeConfig, brancher: Brancher, size: int) -> Group:
        """Grow `width` trees by one branch at a time, each from a random state of its tree (Tree-GRPO)."""
        trees = [[line] for line in await brancher.open(min(config.width, size))]
        grown = lines = list(chain.from_iterable(trees))
        while grown:
            for line in grown:
                brancher.keep_snapshots(line)
            await _all(brancher.play(line) for line in grown)
            chosen: list[Awaitable[list[Line]]] = []
            for tree in trees[: size - len(lines)]:
                # The state before a branch's first turn is its parent's.
                states = [
                    (line, turn)
                    for line in tree
                    for turn in range(line.episode.shared + 1, len(line.episode.turns))
                    if not line.episode.failed
                ]
                number = len(lines) + len(chosen)
                rng = random.Random(derive(brancher.seed, "tree", brancher.group, number))
                chosen.append(brancher.grow(*rng.choice(states or [(tree[0], 0)]), [number]))
            grown = list(chain.from_iterable(await _all(chosen)))
            for tree, branch in zip(trees, grown, strict=False):
                tree.append(branch)
            lines = [*lines, *grown]
        return _group(brancher, lines)


async def _value(brancher: Brancher, line: Line, turn: int, width: int) -> None:
    names = [derive(line.episode.member, "value", turn, number) for number in range(width)]
    branches = await brancher.grow(line, turn, names)
    await _all(brancher.play(branch) for branch in branches)
    found = [sum(turn.reward for turn in each.episode.own_turns) for each in branches if not each.episode.failed]
    # If all continuations failed, the rest of the episode itself is the only sample of the value.
    own = sum(turn.reward for turn in line.episode.turns[turn:])
    line.episode.turns[turn].value = fmean(found or [own])


class Beams:
    """Beam search during play (TSR): after each turn, the `keep` best replies of all episodes of a beam are kept."""

    def __init__(self, config: BeamConfig) -> None:
        self.config = config

    async def find(self, brancher: Brancher, size: int) -> Group:
        """Return a group of `size` episodes, or fewer if some failed."""
        naive, keep = round(self.config.naive * size), self.config.keep
        widths = [min(keep, size - first) for first in range(naive, size, keep)]
        lines = await brancher.open(naive + len(widths))
        beams = zip(lines[naive:], widths, strict=True)
        _, found = await asyncio.gather(
            _all(brancher.play(line) for line in lines[:naive]),
            _all(self._beam(brancher, line, own) for line, own in beams),
        )
        group = _group(brancher, lines[:naive])
        ended = list(chain.from_iterable(found))
        adopt([line.episode for line in ended], naive, brancher.rewards)
        searched = _group(brancher, ended)
        group.episodes, group.failed = group.episodes + searched.episodes, group.failed + searched.failed
        for line in ended:
            brancher.watch(line.episode)
        return group

    async def _beam(self, brancher: Brancher, first: Line, keep: int) -> list[Line]:
        lines, width = [first], self.config.width
        while going := [line for line in lines if not line.over]:
            places = keep - (len(lines) - len(going))
            if len(going) * width <= places:
                # The beam has room for every reply, so nothing needs a score.
                chosen: list[tuple[Line, Sequence[Turn | None]]] = [
                    (line, [None] * self.config.width) for line in going
                ]
            else:
                chosen = await self._choose(brancher, going, places)
            lines = [line for line in lines if line.over]
            lines += chain.from_iterable(await _all(_go_on(brancher, line, replies) for line, replies in chosen))
            lost = [line for line in going if all(line is not kept for kept, _ in chosen)]
            await brancher.close([line.session for line in lost])
            for line in lost:
                line.agent.close()
        return lines

    async def _choose(
        self, brancher: Brancher, going: Sequence[Line], places: int
    ) -> list[tuple[Line, Sequence[Turn | None]]]:
        """Return the best replies, grouped by the line that they continue.

        If scores are equal, distinct actions come before duplicates. Two lines with the same actions and the same
        state would stay identical to the end.
        """
        tried = await _all(self._try(brancher, line) for line in going)
        for own in tried if self.config.correction == "weight" else ():
            if own:
                weigh(own)
        ranked, alike = [], Counter[tuple[float, int, tuple[str, ...]]]()
        for index, own in enumerate(tried):
            for score, reply in own:
                same = (score, index, tuple(reply.actions))
                ranked.append((-score, alike[same], index, reply))
                alike[same] += 1
        ranked.sort(key=lambda item: item[:2])
        # A line whose replies all failed is continued without a choice, so that its episode reports the error.
        kept: dict[int, list[Turn | None]] = {index: [None] for index, own in enumerate(tried) if not own}
        for *_, index, reply in ranked[: max(places - len(kept), 0)]:
            kept.setdefault(index, []).append(reply)
        return [(going[index], kept[index]) for index in sorted(kept)]

    async def _try(self, brancher: Brancher, line: Line) -> list[tuple[float, Turn]]:
        """Sample replies to the state of a line. Each has its score, a mean over `draws` dynamics seeds."""
        member, turn, draws = line.episode.member, len(line.episode.turns), self.config.draws
        names = [
            [derive(member, "try", turn, number, draw) for draw in range(draws)] for number in range(self.config.width)
        ]
        branches = await brancher.grow(line, turn, list(chain.from_iterable(names)))
        depth = self.config.depth if isinstance(self.config, LookaheadConfig) else 0
        found = []
        for number in range(self.config.width):
            first, *others = branches[number * draws : (number + 1) * draws]
            found.append(self._score(brancher, first, others, depth))
        scored = await _all(found)
        return [each for each in scored if each is not None]

    async def _score(
        self, brancher: Brancher, line: Line, others: Sequence[Line], depth: int
    ) -> tuple[float, Turn] | None:
        """Play a reply and return its mean score with it; None if this fails. `others` replay it with other seeds."""
        before = len(line.episode.turns)
        await brancher.play(line, 1)
        if len(line.episode.turns) == before or line.episode.failed:
            return None
        reply = line.episode.turns[before]
        await _all(brancher.play(other, 1, [reply]) for other in others)
        worth = await _all(self._worth(brancher, each, depth) for each in (line, *others) if not each.episode.failed)
        for each in (line, *others):
            if not each.over:
                each.agent.close()
        await brancher.close([each.session for each in (line, *others) if not each.over])
        return fmean(worth), reply

    async def _worth(self, brancher: Brancher, line: Line, depth: int) -> float:
        """Return the score of a line's state, or the best score among the states `depth` turns later."""
        episode = line.episode
        if self.config.score == "reward" and (line.over or not depth):
            return episode.own_return
        if line.over and episode.success is not None:
            return WON if episode.success else LOST
        if line.over or not depth:
            score = line.session.observation.score
            return LOST if score is None else score
        member, turn = episode.member, len(episode.turns)
        names = [derive(member, "below", turn, number) for number in range(self.config.width)]
        below = await brancher.grow(line, turn, names)
        found = await _all(self._score(brancher, each, (), depth - 1) for each in below)
        return max((score for score, _ in (each for each in found if each is not None)), default=LOST)


def best(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return the `count` episodes with the highest returns, in their original order."""
    ranked = sorted(episodes, key=lambda episode: -episode.total_reward)[:count]
    return [episode for episode in episodes if any(episode is each for each in ranked)]


def unsuccessful(episode: Episode) -> bool:
    """Return whether the episode missed its goal. If success is unknown, it must have earned nothing."""
    if episode.failed:
        return False
    return episode.own_return <= 0 if episode.success is None else not episode.success


async def _go_on(brancher: Brancher, line: Line, replies: Sequence[Turn | None]) -> list[Line]:
    """Continue the line and its branches by one turn each, one line per reply. A reply of None is sampled."""
    member, turn = line.episode.member, len(line.episode.turns)
    names = [derive(member, "line", turn, number) for number in range(1, len(replies))]
    lines = [line, *(await brancher.grow(line, turn, names) if names else ())]
    pairs = list(zip(lines, replies, strict=True))
    await _all(brancher.play(each, 1, [] if reply is None else [reply]) for each, reply in pairs)
    for each, reply in pairs:
        if reply is not None and len(each.episode.turns) > turn:
            each.episode.turns[turn].weight = reply.weight
    return lines


def _group(brancher: Brancher, lines: Sequence[Line]) -> Group:
    episodes = [line.episode for line in lines]
    return Group(
        brancher.group,
        [episode for episode in episodes if not episode.failed],
        [episode for episode in episodes if episode.failed],
    )


async def _all(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    return list(await asyncio.gather(*calls))
