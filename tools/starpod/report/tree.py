"""Trees of continuations as SVG: what was played alike is one branch, and each says how many of it succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from starpod.report.figures import show

COLUMN, ROW, MARGIN = 132, 30, 20
"""Pixels of a turn, of a leaf, and around them."""
DEPTH = 12
"""Turns that are drawn; what comes later is told in words at the leaf."""
NAMED = 3
"""Names that an end shows at most."""
LABEL = 17
"""Characters of an action that are shown beside its branch."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One of several ways on from a state. turns: the actions of each. value: the return from there on. name: shown
    where it ends."""

    turns: Sequence[str]
    value: float
    success: bool | None
    name: str = ""


@dataclass(slots=True)
class _Node:
    """What was played alike until here. action: that led here. solved, count: of the continuations through it."""

    action: str = ""
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


def draw_tree(continuations: Sequence[Continuation], label: str) -> str:
    """An SVG; empty without continuations. label: what it shows, for those who do not see it."""
    root = _Node()
    for each in continuations:
        _add(root, each)
    if not root.count:
        return ""
    leaves = _place(root, 0, 0)
    nodes = _walk(root)
    width = max(node.x for node in nodes) + COLUMN + 2 * MARGIN
    height = leaves * ROW + 2 * MARGIN
    parts = [_edge(node, child) for node in nodes for child in node.shown]
    parts += [_dot(node) for node in nodes]
    said = f"{label}: {root.solved} of {root.count} solved. " + "; ".join(
        f"{child.action or 'no action'}: {child.solved} of {child.count}" for child in root.shown
    )
    return (
        f'<svg class="chart tree" role="img" aria-label="{escape(said)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'
    )


def _add(root: _Node, continuation: Continuation) -> None:
    node, solved = root, continuation.success is True
    path = [*continuation.turns[:DEPTH]]
    for depth in range(len(path) + 1):
        node.count += 1
        node.solved += solved
        node.names += [continuation.name] * bool(continuation.name)
        node.longest = max(node.longest, len(continuation.turns) - depth)
        if depth < len(path):
            node = node.children.setdefault(path[depth], _Node(path[depth]))


def _place(node: _Node, depth: int, row: float) -> float:
    """Gives the node and all below it their places; returns how many rows they take."""
    node.x = MARGIN + 8 + depth * COLUMN
    taken = 0.0
    for child in node.shown:
        taken += _place(child, depth + 1, row + taken)
    shown = node.shown
    node.y = (shown[0].y + shown[-1].y) / 2 if shown else MARGIN + ROW * (row + 0.5)
    return max(taken, 1.0)


def _walk(node: _Node) -> list[_Node]:
    return [node, *(below for child in node.shown for below in _walk(child))]


def _edge(node: _Node, child: _Node) -> str:
    """The branch from one node to the next, the wider the more went along it, and its action."""
    text = child.action or "no action"
    short = text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"
    start, bend = f"{node.x:.0f} {node.y:.1f}", f"{node.x + 36:.0f} {child.y:.1f}"
    curve = f"M{start}C{node.x + 24:.0f} {node.y:.1f} {node.x + 12:.0f} {child.y:.1f} {bend}H{child.x:.0f}"
    width = 1 + 5 * child.count / (4 + child.count)
    return (
        f'<path class="branch" style="stroke: {_colour(child)}; stroke-width: {width:.1f}" d="{curve}"/>'
        f'<text x="{node.x + 38:.0f}" y="{child.y - 5:.1f}">{escape(short)}<title>{escape(text)}</title></text>'
    )


def _dot(node: _Node) -> str:
    """A node, the greener the more of what went through it succeeded, and its figures."""
    ends = not node.shown
    told = f"{node.solved} of {node.count}"
    if ends and node.count == 1:
        told = "solved" if node.solved else "not solved"
    if ends and 0 < len(node.names) <= NAMED:
        told = f"{', '.join(node.names)}: {told}"
    if ends and node.longest:
        told += f", {node.longest} more turn{'s' if node.longest > 1 else ''}"
    # Below the branch that comes in, where none goes out; the first node has none.
    anchor, x, y = ("start", 11, 4) if ends else ("end", -8, 15) if node.action else ("start", -8, -11)
    place = f'text-anchor="{anchor}" x="{node.x + x:.0f}" y="{node.y + y:.1f}"'
    return (
        f'<circle cx="{node.x:.0f}" cy="{node.y:.1f}" r="6" style="fill: {_colour(node)}">'
        f"<title>{told}, {show(node.share, 'share')}</title></circle><text {place}>{told}</text>"
    )


def _colour(node: _Node) -> str:
    return f"color-mix(in oklab, var(--c2) {100 * node.share:.0f}%, var(--c4))"
