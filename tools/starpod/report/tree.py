"""Trees of continuations as SVG. Equal turns share a branch, and each branch shows how many continuations succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate

from starpod.report.figures import show

ROW, MARGIN = 34, 20
"""Pixels per leaf, and around the whole tree."""
BEND, DOT = 38, 11
"""Pixels from a node to the text on a branch, and from a dot's centre to the text beside it."""
MAX_DEPTH = 12
"""Maximum number of turns drawn. The text at a leaf says how many more turns follow."""
MAX_NAMES = 3
"""Maximum number of continuation names shown at a leaf."""
MAX_CHARACTERS = 17
"""Maximum number of characters of an action shown at its branch."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One of several continuations of an episode from a state."""

    turns: Sequence[str]
    """The actions of each turn."""
    value: float
    """The return from the state on."""
    success: bool | None
    name: str = ""
    """Name shown at the end of the continuation."""
    link: str = ""
    """Address of the continuation's page."""


@dataclass(slots=True)
class _Node:
    """The state that all continuations with the same first turns reach."""

    action: str = ""
    """The action that leads here from the parent."""
    path: tuple[str, ...] = ()
    """All actions from the root."""
    link: str = ""
    """URL of the page of the first continuation that contains this node."""
    count: int = 0
    solved: int = 0
    """Number of successful continuations among the `count` that pass through this node."""
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
        """The children whose branches are drawn; empty if only one continuation passes through this node."""
        if self.count < 2:
            return []
        return sorted(self.children.values(), key=lambda child: (-child.share, -child.count, child.action))

    @property
    def text(self) -> str:
        """The text at the branch that leads here."""
        text = self.action or "no action"
        return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"

    @property
    def caption(self) -> str:
        """The text beside the node's dot."""
        caption = f"{self.solved} of {self.count}"
        if self.shown:
            return caption
        if self.count == 1:
            caption = "solved" if self.solved else "not solved"
        if 0 < len(self.names) <= MAX_NAMES:
            caption = f"{', '.join(self.names)}: {caption}"
        return caption + (f", {self.longest} more turn{'s' if self.longest > 1 else ''}" if self.longest else "")


def draw_tree(continuations: Sequence[Continuation], label: str) -> str:
    """Return the tree as an <svg> element; empty without continuations. label: description for screen readers."""
    root = _Node()
    for continuation in continuations:
        _add(root, continuation)
    if not root.count:
        return ""
    leaves = _set_places(root, 0, 0)
    nodes = _walk(root)
    _widen(nodes)
    width = max(node.x + (0 if node.shown else DOT + _text_width(node.caption)) for node in nodes) + MARGIN
    height = leaves * ROW + 2 * MARGIN
    parts = [_draw_edge(node, child) for node in nodes for child in node.shown]
    parts += [_draw_dot(node) for node in nodes]
    aria = f"{label}: {root.solved} of {root.count} solved. " + "; ".join(
        f"{child.action or 'no action'}: {child.solved} of {child.count}" for child in root.shown
    )
    role = "group" if any(continuation.link for continuation in continuations) else "img"  # an "img" may not have links
    return (
        f'<svg class="tree" role="{role}" aria-label="{escape(aria)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'
    )


def _text_width(text: str) -> float:
    """Return an upper estimate of a text's width in pixels."""
    return sum(11.0 if letter in "MW…" else 8.5 if letter.isupper() else 7.0 for letter in text)


def _add(root: _Node, continuation: Continuation) -> None:
    node, is_solved = root, continuation.success is True
    path = [*continuation.turns[:MAX_DEPTH]]
    for depth in range(len(path) + 1):
        node.count += 1
        node.solved += is_solved
        node.names += [continuation.name] * bool(continuation.name)
        node.longest = max(node.longest, len(continuation.turns) - depth)
        node.link = node.link or continuation.link
        if depth < len(path):
            node = node.children.setdefault(path[depth], _Node(path[depth], tuple(path[: depth + 1])))


def _set_places(node: _Node, depth: int, row: float) -> float:
    """Set the column (x) and height (y) of a node and its descendants. Return the number of rows that they take."""
    node.x = depth
    rows = 0.0
    for child in node.shown:
        rows += _set_places(child, depth + 1, row + rows)
    children = node.shown
    node.y = (children[0].y + children[-1].y) / 2 if children else MARGIN + ROW * (row + 0.5)
    return max(rows, 1.0)


def _widen(nodes: Sequence[_Node]) -> None:
    """Make each column as wide as its texts: the action above a branch and the caption below it."""
    columns: dict[int, float] = {}
    for node in nodes:
        caption = _text_width(node.caption) if node.shown else 0.0
        width = BEND + max(_text_width(node.text), caption) + DOT if node.path else MARGIN + caption + DOT
        columns[int(node.x)] = max(columns.get(int(node.x), 0.0), width)
    places = list(accumulate(columns[column] for column in sorted(columns)))
    for node in nodes:
        node.x = places[int(node.x)]


def _walk(node: _Node) -> list[_Node]:
    return [node, *(descendant for child in node.shown for descendant in _walk(child))]


def _draw_edge(node: _Node, child: _Node) -> str:
    """Return the branch to a child with its action. The more continuations take the branch, the wider it is."""
    start, bend = f"{node.x:.0f} {node.y:.1f}", f"{node.x + BEND - 2:.0f} {child.y:.1f}"
    curve = f"M{start}C{node.x + 24:.0f} {node.y:.1f} {node.x + 12:.0f} {child.y:.1f} {bend}H{child.x:.0f}"
    width = 1 + 5 * child.count / (4 + child.count)
    return (
        f'<path class="branch" style="stroke: {_colour_of(child)}; stroke-width: {width:.1f}" d="{curve}"/>'
        f'<text aria-hidden="true" x="{node.x + BEND:.0f}" y="{child.y - 6:.1f}">{escape(child.text)}'
        f"<title>{escape(child.action or 'no action')}</title></text>"
    )


def _draw_dot(node: _Node) -> str:
    """Return a node's dot and caption, greener if more continuations succeed. A leaf links to its page."""
    ends = not node.shown
    # The caption is below the incoming branch, except at the root and at ends.
    anchor, x, y = ("start", DOT, 4) if ends else ("end", -DOT, 15 if node.path else 4)
    is_link, caption = ends and node.link, escape(node.caption)
    title = "" if is_link else f"<title>{caption}, {show(node.share, 'share')}</title>"
    drawing = (
        f'<circle cx="{node.x:.0f}" cy="{node.y:.1f}" r="6" style="fill: {_colour_of(node)}">{title}</circle>'
        f'<text aria-hidden="true" text-anchor="{anchor}" x="{node.x + x:.0f}" y="{node.y + y:.1f}">{caption}</text>'
    )
    if not is_link:
        return drawing
    description = f"{node.caption}: {', '.join(action or 'no action' for action in node.path) or 'no turn'}"
    width = 2 * DOT + _text_width(node.caption)
    box = f'x="{node.x - DOT:.0f}" y="{node.y - 12:.1f}" width="{width:.0f}" height="24"'
    return f'<a href="{escape(node.link)}" aria-label="{escape(description)}"><rect {box}/>{drawing}</a>'


def _colour_of(node: _Node) -> str:
    return f"color-mix(in oklab, var(--c2) {100 * node.share:.0f}%, var(--c4))"
