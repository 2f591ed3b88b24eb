"""Groups of episodes that began in one start state, and what is selected from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starpod.trainer.data.episode import Episode, Turn


@dataclass(slots=True)
class Spent:
    """Cost of a search, including what it discarded."""

    steps: int = 0
    """Number of turns that an environment stepped."""
    tokens: int = 0
    """Number of sampled tokens."""
    forks: int = 0
    """Number of forks."""

    def add(self, turns: Sequence[Turn], *, sampled: int) -> None:
        """Count turns that were played. The last `sampled` of them were sampled, and the others replayed."""
        self.steps += sum(bool(turn.actions) for turn in turns)
        self.tokens += sum(len(turn.reply) for turn in turns[len(turns) - sampled :])


@dataclass(slots=True)
class Group:
    """The episodes of one start state."""

    id: int
    """Group id of its episodes."""
    episodes: list[Episode]
    """Episodes that may be trained on, by member."""
    failed: list[Episode] = field(default_factory=list)
    """Episodes that failed, by member."""
    branches: list[Episode] = field(default_factory=list)
    """Episodes with a parent among `episodes`. They are only compared with their siblings."""
    spent: Spent | None = None
    """Cost of the search; None without one."""
    naive: int | None = None
    """Number of the first members, which were played without search; None: a search chose no member."""

    @property
    def members(self) -> list[Episode]:
        """All episodes by member, including failed ones and branches."""
        return sorted([*self.episodes, *self.branches, *self.failed], key=lambda episode: episode.member)

    @property
    def unchosen(self) -> list[Episode]:
        """Episodes that no search chose by their results, so that their success is the policy's."""
        return [episode for episode in self.episodes if self.naive is None or episode.member < self.naive]

    @property
    def kind(self) -> str:
        """Kind of its episodes; "" without any."""
        return next((episode.kind for episode in (*self.episodes, *self.failed)), "")

    @property
    def returns(self) -> list[float]:
        """Return of each episode."""
        return [episode.total_reward for episode in self.episodes]

    @property
    def reward_std(self) -> float:
        """Standard deviation of the raw returns with ddof=1; 0 for fewer than two episodes."""
        return statistics.stdev(self.returns) if len(self.episodes) > 1 else 0.0

    @property
    def own_std(self) -> float:
        """Standard deviation of the environment's own returns, without penalties and shaping."""
        return statistics.stdev(episode.own_return for episode in self.episodes) if len(self.episodes) > 1 else 0.0

    @property
    def identical(self) -> bool:
        """Whether all members gave the same replies. Differences of their returns are then chance."""
        replies = [[turn.reply or turn.text for turn in episode.turns] for episode in self.episodes]
        return len(replies) > 1 and all(sequence == replies[0] for sequence in replies)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` is the inverse; `spent` and `naive` are not kept."""
        parts = {"episodes": self.episodes, "failed": self.failed, "branches": self.branches}
        return {"id": self.id} | {name: [episode.to_json() for episode in part] for name, part in parts.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Group:
        """Return the group that `to_json` wrote."""
        parts = ("episodes", "failed", "branches")
        episodes, failed, branches = ([Episode.from_json(item) for item in values.get(part, ())] for part in parts)
        return cls(values["id"], episodes, failed, branches)


def by_kind(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each kind, in order. Batch statistics only combine groups of one kind."""
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        kinds.setdefault(group.kind, []).append(group)
    return kinds


def episodes_of(groups: Sequence[Group]) -> list[Episode]:
    """Return all episodes that can be trained on, in the order of the groups.

    Episodes without a sampled token are left out. Their first prompt was too long.
    """
    return [episode for group in groups for episode in group.episodes if episode.sampled_tokens]


def branches_of(groups: Sequence[Group]) -> list[Episode]:
    """Return the branches that can be trained on. If all branches of a state have equal returns, they are left out."""
    branches = []
    for group in groups:
        states = siblings_of(group.branches).values()
        branches += [branch for peers in states if Group(group.id, peers).reward_std > 1e-8 for branch in peers]
    return [branch for branch in branches if branch.sampled_tokens]


def siblings_of(episodes: Sequence[Episode]) -> dict[tuple[int, int], list[Episode]]:
    """Return the branches among these episodes, in order, by the state in which they begin (`Episode.parent`)."""
    states: dict[tuple[int, int], list[Episode]] = {}
    for episode in episodes:
        if episode.parent is not None:
            states.setdefault(episode.parent, []).append(episode)
    return states
