"""Page of a group: where its members diverge, how each branch ended, and whether the run's filter kept the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from starpod.report.tree import Continuation, draw_tree
from starpod.trainer.algorithms.filters import filter_groups, verdicts
from starpod.trainer.algorithms.sections import Filter
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.data.group import Group
from starpod.trainer.data.updates import Verdict, read_verdicts, update_file
from starpod.ui.episodes import KINDS, episode_link, picture_link
from starpod.ui.page import LiveSite, number, render
from starpod.ui.reading import load_episode, mapping

NAMED = 4
"""Maximum number of other members that are listed by number. If there are more, only their number is shown."""
_FILTER: TypeAdapter[Filter] = TypeAdapter(Filter)


@dataclass(slots=True)
class Member:
    """One member of a group."""

    row: Mapping[str, Any]
    episode: Mapping[str, Any]
    actions: list[str] = field(default_factory=list)
    """Actions of each turn. Equal actions that led to different states are numbered, such as "Left (2)"."""
    marks: dict[int, list[str]] = field(default_factory=dict)
    """Remarks by turn, for turns at which this member diverges from others."""

    @property
    def number(self) -> int:
        return int(self.row["member"])

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        turns: Sequence[Mapping[str, Any]] = self.episode["turns"]
        return turns

    @property
    def parent(self) -> tuple[int, int] | None:
        """Number of the member from which a tree search branched this one, and the number of shared turns, or None."""
        member, turns = self.episode.get("parent") or (None, 0)
        return None if member is None else (member, turns)

    @property
    def shared(self) -> int:
        return self.parent[1] if self.parent else 0

    def state(self, turn: int) -> str:
        """Return the observation before a turn, or the final one if there is no such turn."""
        return str(
            self.turns[turn]["observation"] if turn < len(self.turns) else self.episode.get("final_observation", "")
        )

    def mark(self, turn: int, difference: str, others: Sequence[Member], peers: Sequence[Member]) -> None:
        """Note that the member diverges from others at a turn, unless it shares that turn with its parent.

        Args:
            turn: index of the turn, from 0.
            difference: what differs, such as "another action".
            others: members from which this one diverges.
            peers: members that continue like this member at the turn, this member included.
        """
        if self.shared <= turn < len(self.turns):
            companions = f"with {_list_members(peers, excluded=self)}" if len(peers) > 1 else "alone"
            self.marks.setdefault(turn, []).append(f"{difference} than {_list_members(others)}, continues {companions}")


@dataclass(frozen=True, slots=True)
class MemberBranch:
    """Members that took the same actions at a turn and then saw the same state."""

    actions: str
    members: list[Member]
    turn: int

    @property
    def solved(self) -> int:
        return sum(member.row["outcome"] == "solved" for member in self.members)

    @property
    def mean(self) -> float:
        return fmean(member.row["reward"] for member in self.members)

    @property
    def grown(self) -> int:
        """Number of members that a tree search branched off from this state."""
        return sum(member.parent is not None and member.shared == self.turn for member in self.members)


@dataclass(frozen=True, slots=True)
class Parting:
    """A state from which members diverge."""

    turn: int
    """Number of the turn that follows the state."""
    branches: list[MemberBranch]

    @property
    def shown(self) -> Member:
        """A member that passed the state, preferably one without a parent, because its turns can be replayed."""
        members = (member for branch in self.branches for member in branch.members)
        return min(members, key=lambda member: member.parent is not None)


def group_page(site: LiveSite, request: Request, drawn: bytes | None) -> Response:
    """Show the members of a group as a tree of their actions, and side by side.

    Args:
        request: its query names the group by `run`, `file` and `group`.
        drawn: the group's first picture, as in `with_pictures`; None: the page has no pictures.
    """
    run = site.run(request.query_params.get("run", ""))
    name, grp = request.query_params.get("file", ""), number(request, "group")
    rows = site.index.group(run["run"], name, grp)
    if not rows:
        raise HTTPException(404, f"There is no group {grp} in {name or 'no file'}: the oldest rollouts are removed.")
    path = site.folder(run["path"]) / "episodes" / rows[0]["name"]
    members = [Member(row, load_episode(path, row["start"]).to_json()) for row in rows]
    partings = part_ways(members)
    lines = [
        Continuation(member.actions, member.row["reward"], member.episode.get("success"), f"member {member.number}")
        for member in members
    ]
    verdict, kept_count, groups = _filter_verdict(path, grp) if rows[0]["kind"] == "train" else (None, 0, 0)
    return render(
        "group.html", site=site, run=run, name=name, grp=grp, members=members, partings=partings, link=episode_link,
        picture_link=picture_link, tree=Markup(draw_tree(lines, "Actions of the members")),
        drawn=drawn is not None, verdict=verdict, kept=kept_count, groups=groups,
        kind=KINDS.get(rows[0]["kind"], rows[0]["kind"]),
        deviation=stdev(row["reward"] for row in rows) if len(rows) > 1 else 0.0,
    )  # fmt: skip


def part_ways(members: Sequence[Member]) -> list[Parting]:
    """Return the states at which members diverge, turn by turn, and fill in the members' `actions` and `marks`.

    Members diverge by different actions, or because equal actions led to different states.
    """
    partings: list[Parting] = []
    clusters, turn = [list(members)], -1  # -1: members may differ in their first observation
    while clusters:
        splits = [_branches([member for member in cluster if turn < len(member.turns)], turn) for cluster in clusters]
        partings += [Parting(turn, branches) for branches in splits if len(branches) > 1 and turn >= 0]
        clusters, turn = [branch.members for branches in splits for branch in branches], turn + 1
    return partings


def _branches(members: Sequence[Member], turn: int) -> list[MemberBranch]:
    """Group members by what they did at a turn. Up to this turn, they have the same actions and states.

    Add the turn to each member's `actions`, and a mark where the member diverges from the others.
    """
    branches: list[MemberBranch] = []
    for actions, states in _group_by_actions(members, turn).items():
        peers = [member for group in states.values() for member in group]
        for index, group in enumerate(states.values(), 1):
            suffix = f" ({index})" if len(states) > 1 else ""
            for member in group:
                if turn >= 0 or suffix:
                    member.actions.append(actions + suffix)
                if len(peers) < len(members):
                    member.mark(turn, "another action", _without(members, peers), peers)
                if suffix:
                    member.mark(turn + 1, "another state", _without(peers, group), group)
            branches.append(MemberBranch(actions + suffix, group, turn))
    return branches


def _group_by_actions(members: Sequence[Member], turn: int) -> dict[str, dict[str, list[Member]]]:
    """Group members by their actions at a turn, and then by the observation that followed."""
    ways: dict[str, dict[str, list[Member]]] = {}
    for member in members:
        actions = " ".join(member.turns[turn]["actions"]) if turn >= 0 else "start"
        ways.setdefault(actions, {}).setdefault(member.state(turn + 1), []).append(member)
    return ways


def _without(members: Sequence[Member], excluded: Sequence[Member]) -> list[Member]:
    return [member for member in members if all(member is not peer for peer in excluded)]


def _list_members(members: Sequence[Member], excluded: Member | None = None) -> str:
    """Return the members in words, such as "member 3", "members 1, 3" or "9 others"."""
    numbers = [member.number for member in members if member is not excluded]
    if len(numbers) > NAMED:
        return f"{len(numbers)} others"
    return f"member{'s'[: len(numbers) > 1]} {', '.join(map(str, numbers))}"


def _filter_verdict(path: Path, grp: int) -> tuple[Verdict | None, int, int]:
    """Return the filter's verdict on a group, and the numbers of kept groups and of all groups in the group's file.

    Verdicts are recorded in training. If the run was cut off during the update, they are computed again.
    """
    by_group = read_verdicts(update_file(path))
    try:
        if not by_group:
            config = _FILTER.validate_python(mapping(path.parent.parent / "config.yaml", [])["algorithm"]["filter"])
            groups: dict[int, Group] = {}
            for episode in read_episodes(path):
                group = groups.setdefault(episode.group, Group(episode.group, []))
                (group.failed if episode.failed else group.episodes).append(episode)
            by_group = verdicts(config, list(groups.values()), filter_groups(config, list(groups.values())))
    except (BadEpisodes, KeyError, TypeError, ValueError):
        return None, 0, 0
    return by_group.get(grp), sum(verdict.kept for verdict in by_group.values()), len(by_group)
