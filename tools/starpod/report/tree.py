"""Trees of continuations as SVG: what was played alike is one branch, and each says how many of it succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate

from starpod.report.figures import show

ROW, MARGIN = 34, 20
"""Pixels of a leaf, and around all."""
BEND, DOT = 38, 11
"""Pixels from a node to the text of a branch that goes out, and from a dot's middle to a text beside it."""
DEPTH = 12
"""Turns that are drawn; what comes later is told in words at the leaf."""
NAMED = 3
"""Names that an end shows at most."""
LABEL = 17
"""Characters of an action that are shown beside its branch."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One of several ways on from a state. turns: the actions of each. value: the return from there on. name: shown
    where it ends. link: to its page."""

    turns: Sequence[str]
    value: float
    success: bool | None
    name: str = ""
    link: str = ""


@dataclass(slots=True)
class _Node:
    """What was played alike until here. action: that led here; path: all of them. link: to the first continuation
    through it. solved, count: of these."""

    action: str = ""
    path: tuple[str, ...] = ()
    link: str = ""
    count: int = 0
    solved: int = 0
    longest: int = 0
    names: list[str] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)
    x: float = 0.0
    y: float = 0.0

    @property
    def share(self) -> float:
        return self.solved / self.count

    @property
    def shown(self) -> list[_Node]:
        """The branches that are drawn: none of a node that one continuation alone went through."""
        if self.count < 2:
            return []
        return sorted(self.children.values(), key=lambda child: (-child.share, -child.count, child.action))

    @property
    def text(self) -> str:
        """Beside the branch that leads here."""
        text = self.action or "no action"
        return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"

    @property
    def told(self) -> str:
        """Beside its dot."""
        told = f"{self.solved} of {self.count}"
        if self.shown:
            return told
        if self.count == 1:
            told = "solved" if self.solved else "not solved"
        if 0 < len(self.names) <= NAMED:
            told = f"{', '.join(self.names)}: {told}"
        return told + (f", {self.longest} more turn{'s' if self.longest > 1 else ''}" if self.longest else "")


def draw_tree(continuations: Sequence[Continuation], label: str) -> str:
    """An SVG; empty without continuations. label: what it shows, for those who do not see it."""
    root = _Node()
    for each in continuations:
        _add(root, each)
    if not root.count:
        return ""
    leaves = _place(root, 0, 0)
    nodes = _walk(root)
    _widen(nodes)
    width = max(node.x + (0 if node.shown else DOT + _wide(node.told)) for node in nodes) + MARGIN
    height = leaves * ROW + 2 * MARGIN
    parts = [_edge(node, child) for node in nodes for child in node.shown]
    parts += [_dot(node) for node in nodes]
    said = f"{label}: {root.solved} of {root.count} solved. " + "; ".join(
        f"{child.action or 'no action'}: {child.solved} of {child.count}" for child in root.shown
    )
    role = "group" if any(each.link for each in continuations) else "img"  # a picture holds no links
    return (
        f'<svg class="chart tree" role="{role}" aria-label="{escape(said)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'
    )


def _wide(text: str) -> float:
    """Pixels that a text takes at most: nobody has measured it."""
    return sum(11.0 if letter in "MW…" else 8.5 if letter.isupper() else 7.0 for letter in text)


def _add(root: _Node, continuation: Continuation) -> None:
    node, solved = root, continuation.success is True
    path = [*continuation.turns[:DEPTH]]
    for depth in range(len(path) + 1):
        node.count += 1
        node.solved += solved
        node.names += [continuation.name] * bool(continuation.name)
        node.longest = max(node.longest, len(continuation.turns) - depth)
        node.link = node.link or continuation.link
        if depth < len(path):
            node = node.children.setdefault(path[depth], _Node(path[depth], tuple(path[: depth + 1])))


def _place(node: _Node, depth: int, row: float) -> float:
    """Give the node and all below it their columns and heights; returns how many rows they take."""
    node.x = depth
    taken = 0.0
    for child in node.shown:
        taken += _place(child, depth + 1, row + taken)
    shown = node.shown
    node.y = (shown[0].y + shown[-1].y) / 2 if shown else MARGIN + ROW * (row + 0.5)
    return max(taken, 1.0)


def _widen(nodes: Sequence[_Node]) -> None:
    """Make each column as wide as its texts: the action above a branch, the figures of its end below it."""
    columns: dict[int, float] = {}
    for node in nodes:
        told = _wide(node.told) if node.shown else 0.0
        wide = BEND + max(_wide(node.text), told) + DOT if node.path else MARGIN + told + DOT
        columns[int(node.x)] = max(columns.get(int(node.x), 0.0), wide)
    places = list(accumulate(columns[each] for each in sorted(columns)))
    for node in nodes:
        node.x = places[int(node.x)]


def _walk(node: _Node) -> list[_Node]:
    return [node, *(below for child in node.shown for below in _walk(child))]


def _edge(node: _Node, child: _Node) -> str:
    """The branch from one node to the next, the wider the more went along it, and its action."""
    start, bend = f"{node.x:.0f} {node.y:.1f}", f"{node.x + BEND - 2:.0f} {child.y:.1f}"
    curve = f"M{start}C{node.x + 24:.0f} {node.y:.1f} {node.x + 12:.0f} {child.y:.1f} {bend}H{child.x:.0f}"
    width = 1 + 5 * child.count / (4 + child.count)
    return (
        f'<path class="branch" style="stroke: {_colour(child)}; stroke-width: {width:.1f}" d="{curve}"/>'
        f'<text aria-hidden="true" x="{node.x + BEND:.0f}" y="{child.y - 6:.1f}">{escape(child.text)}'
        f"<title>{escape(child.action or 'no action')}</title></text>"
    )


def _dot(node: _Node) -> str:
    """A node, the greener the more of what went through it succeeded, and its figures; an end leads to its page."""
    ends = not node.shown
    # Below the branch that comes in, where none goes out; the first node has none, and nothing before it.
    anchor, x, y = ("start", DOT, 4) if ends else ("end", -DOT, 15 if node.path else 4)
    leads, told = ends and node.link, escape(node.told)
    title = "" if leads else f"<title>{told}, {show(node.share, 'share')}</title>"
    drawn = (
        f'<circle cx="{node.x:.0f}" cy="{node.y:.1f}" r="6" style="fill: {_colour(node)}">{title}</circle>'
        f'<text aria-hidden="true" text-anchor="{anchor}" x="{node.x + x:.0f}" y="{node.y + y:.1f}">{told}</text>'
    )
    if not leads:
        return drawn
    said = f"{node.told}: {', '.join(each or 'no action' for each in node.path) or 'no turn'}"
    width = 2 * DOT + _wide(node.told)
    place = f'x="{node.x - DOT:.0f}" y="{node.y - 12:.1f}" width="{width:.0f}" height="24"'
    return f'<a href="{escape(node.link)}" aria-label="{escape(said)}"><rect {place}/>{drawn}</a>'


def _colour(node: _Node) -> str:
    return f"color-mix(in oklab, var(--c2) {100 * node.share:.0f}%, var(--c4))"
