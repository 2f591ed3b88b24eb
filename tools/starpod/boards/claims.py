"""Parser of claims about the state in a thought. Free text never makes it fail.

It understands two notations and ignores everything else. docs/rewards.md has the rules and examples.

Compact: each word is a direction, "-", a number or a symbol of the board, as in observations of the format `local`:
    P 1 3 G 0 0         the player is at row 1, column 3; the goal at (0, 0)
    Up Left, - Left     vertical and horizontal direction to the goal, or to the nearest loose box; "-" for level
    Up Left - Right     the second pair is the direction from that box to the nearest free target
A direction that is not in a pair is part of a plan and makes no claim.

Sentences:
    SUBJECT is at (1, 2) | at row 1, column 2            player, I, you, goal, box, hole, target, wall
    SUBJECT is up and left | below me | right of the box | in the same row
    DIRECTION is a hole | wall | box | target | goal | ice | empty | free | blocked
    a hole below me, a wall on the left
    I cannot go DIRECTION                                 claims that it is blocked
    I will be at (1, 2), the box will be at (1, 3)        about the state after the turn
    I will move, I stay                                   about the state after the turn
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from starpod.boards.scene import STEPS, Cell

Topic = tuple[str | Cell, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement about the state.

    Claims are scored by topic: a repeated true claim earns nothing, and one false claim makes its topic false. Topics:

        ("at", "player" | "goal"), value Cell                 position of the player or of the goal
        ("at", kind, cell), value True                        a cell contains a thing of this kind
        ("way", from, to, "vertical" | "horizontal"), value   a direction, or "-" for level
        ("beside", direction), value str                      content of the player's neighbouring cell
        ("after", "player"), value Cell                       position of the player after the turn
        ("after", "box", cell), value True                    a cell contains a box after the turn
        ("after", "moves"), value bool                        whether the turn moves the player
    """

    topic: Topic
    value: str | bool | Cell


DIRECTIONS = {
    **dict.fromkeys("up above north".split(), "Up"),
    **dict.fromkeys("down below beneath under south".split(), "Down"),
    **dict.fromkeys("left west".split(), "Left"),
    **dict.fromkeys("right east".split(), "Right"),
}
_OPPOSITE = {"Up": "Down", "Down": "Up", "Left": "Right", "Right": "Left"}
_AXES = {"Up": "vertical", "Down": "vertical", "Left": "horizontal", "Right": "horizontal"}

NOUNS = {
    **dict.fromkeys("i i'm i'll player you you're agent position".split(), "player"),
    **dict.fromkeys("box boxes crate crates".split(), "box"),
    **dict.fromkeys("hole holes".split(), "hole"),
    **dict.fromkeys("wall walls edge border".split(), "wall"),
    **dict.fromkeys("goal goals".split(), "goal"),
    **dict.fromkeys("target targets".split(), "target"),
}
STATES = {
    **dict.fromkeys("ice frozen empty floor".split(), "plain"),
    **dict.fromkeys("free safe open clear".split(), "free"),
    "blocked": "blocked",
}
_ME = {"me", "myself", "player", "you"}
_FILLERS = set(
    "is are am lies lie sits sit stands stand standing located now currently at in on to the a an my be "
    "cell tile coordinates coordinate directly just immediately straight also both : =".split()
)
_FUTURE = {"will", "would"}
_COPULAS = set("is are has holds hits leads falls means : =".split())
_ARTICLES = set("a an the to into in my just only".split())
_NOT = re.compile(r"(?:not|no|never|\w+n't|without|cannot)$")
_CANNOT = {"cannot", "can't"}
_GO = {"move", "go", "step", "walk", "push"}

_NUMBER = r"(\d{1,3})"
_TOKEN = re.compile(
    rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)"
    rf"|\brow\s+{_NUMBER}\s*(?:,\s*)?(?:and\s+)?col(?:umn)?\s+{_NUMBER}"
    r"|([A-Za-z]+(?:'[a-z]+)?)"
    r"|(\S)"
    r"|(\n)",
    re.IGNORECASE,
)

Token = str | Cell


def read_claims(thought: str, family: str, legend: Mapping[str, frozenset[str]]) -> list[Claim]:
    """Return the claims of a thought, without duplicates. Never raises; its time is linear in the thought's length.

    Args:
        family: "frozen_lake" or "sokoban".
        legend: kinds of things that each symbol shows, as `legend_of` returns it.
    """
    words = thought.split()
    claims = _read_compact(words, family, legend) if _is_compact(words, legend) else _Sentences(thought, family, legend)
    return list(dict.fromkeys(claims))


# --- compact ----------------------------------------------------------------------------------------------------------


def _is_compact(words: Sequence[str], legend: Mapping[str, frozenset[str]]) -> bool:
    return bool(words) and all(word in STEPS or word == "-" or _is_number(word) or word in legend for word in words)


def _is_number(word: str) -> bool:
    return len(word) <= 3 and word.isascii() and word.isdigit()


def _read_compact(words: Sequence[str], family: str, legend: Mapping[str, frozenset[str]]) -> Iterator[Claim]:
    """Yield the claims of a compact thought.

    Pairs of directions count only at the start and after a position. Elsewhere, directions are a plan.
    """
    index, pairs, open_to_pairs = 0, 0, True
    while index < len(words):
        word, next_words = words[index], words[index + 1 : index + 3]
        if word in legend and len(next_words) == 2 and all(map(_is_number, next_words)):
            cell = int(next_words[0]), int(next_words[1])
            for kind in sorted(legend[word] & {"player", "goal", "box", "hole", "target", "wall"}):
                yield _position(kind, cell)
            index, open_to_pairs = index + 3, True
        elif open_to_pairs and _is_pair(words[index : index + 2]):
            origin, to = ("player", "goal" if family == "frozen_lake" else "box") if not pairs else ("box", "target")
            if pairs < 1 + (family == "sokoban"):
                yield Claim(("way", origin, to, "vertical"), word)
                yield Claim(("way", origin, to, "horizontal"), next_words[0])
            index, pairs = index + 2, pairs + 1
        else:
            index, open_to_pairs = index + 1, False


def _is_pair(words: Sequence[str]) -> bool:
    return (
        len(words) == 2
        and words[0] in ("Up", "Down", "-")
        and words[1] in ("Left", "Right", "-")
        and tuple(words) != ("-", "-")
    )


def _position(kind: str, cell: Cell, *, after: bool = False) -> Claim:
    if after:
        return Claim(("after", kind), cell) if kind == "player" else Claim(("after", kind, cell), True)
    return Claim(("at", kind), cell) if kind in ("player", "goal") else Claim(("at", kind, cell), True)


# --- sentences --------------------------------------------------------------------------------------------------------


class _Sentences:
    """Iterator over the claims in sentences. It reads the words once and looks for subjects and directions."""

    def __init__(self, text: str, family: str, legend: Mapping[str, frozenset[str]]) -> None:
        # Models often call the goal of a lake a target, and a target of Sokoban a goal.
        self._alias = {"target": "goal"} if family == "frozen_lake" else {"goal": "target"}
        self._legend = legend
        self._tokens: list[Token] = []
        self._kinds: list[str | None] = []
        for match in _TOKEN.finditer(text.replace("\u2019", "'")):
            row, column, long_row, long_column, word, symbol, _ = match.groups()
            if row or long_row:
                self._add((int(row or long_row), int(column or long_column)), None)
            elif word:
                self._add(word.lower(), self._noun(word))
            elif symbol:
                self._add(symbol, self._symbol(symbol) if symbol not in ".,;:!?=()" else None)
            else:
                self._add(".", None)

    def _add(self, token: Token, kind: str | None) -> None:
        self._tokens.append(token)
        self._kinds.append(kind)

    def __iter__(self) -> Iterator[Claim]:
        place = 0
        while place < len(self._tokens):
            token, kind = self._tokens[place], self._kinds[place]
            claims: Sequence[Claim] = ()
            end = place + 1
            if kind in NOUNS.values() and not self._denied(place):
                claims, end = self._about(kind or "", place + 1)
            elif token in DIRECTIONS:
                claims, end = self._beside(place)
            elif token in _CANNOT:
                claims, end = self._cannot(place + 1)
            yield from claims
            place = end if claims else place + 1

    # --- the forms ---

    def _about(self, kind: str, place: int) -> tuple[Sequence[Claim], int]:
        """Read what follows a subject: a place, a direction, or its state after the turn.

        Like the methods below, return the claims and the index of the first token that was not read.
        """
        after = self._at(place - 1) == "i'll"
        place += self._at(place) == "position"
        while self._at(place) in _FILLERS or self._at(place) in _FUTURE:
            after = after or self._at(place) in _FUTURE
            place += 1
        token = self._at(place)
        if isinstance(token, tuple):
            return self._places(kind, place, after)
        if kind == "player" and (token in ("stay", "remain") or (after and token == "move")):
            return [Claim(("after", "moves"), token == "move")], place + 1
        if after:
            return (), place
        if token == "same" and self._at(place + 1) in ("row", "column", "col"):
            axis = "vertical" if self._at(place + 1) == "row" else "horizontal"
            return ([Claim(("way", "player", kind, axis), "-")] if kind != "player" else ()), place + 2
        if token in DIRECTIONS:
            return self._direction(kind, place)
        return (), place

    def _places(self, kind: str, place: int, after: bool) -> tuple[Sequence[Claim], int]:
        """Read one place, or several: "holes at (1, 0), (3, 3) and (2, 1)"."""
        claims: list[Claim] = []
        while True:
            cell = self._at(place)
            if not isinstance(cell, tuple):
                return claims, place
            if not after or kind in ("player", "box"):
                claims.append(_position(kind, cell, after=after))
            place += 1
            link = place
            while self._at(link) in (",", "and"):
                link += 1
            if link > place and isinstance(self._at(link), tuple):
                place = link

    def _direction(self, kind: str, place: int) -> tuple[Sequence[Claim], int]:
        """Read the end of "the goal is up and left", "a hole below me" or "the box is left of the target".

        The text before the direction at `place` has already been read: its subject is `kind`.
        """
        directions, place = self._list(place)
        origin, end = self._reference(place)
        if kind in ("goal", "box", "target") or (origin and kind == "player"):
            claims = []
            for direction in directions:
                source, to, value = (origin or "player"), kind, direction
                if to == "player":
                    source, to, value = to, source, _OPPOSITE[direction]
                if source != to:
                    claims.append(Claim(("way", source, to, _AXES[direction]), value))
            return claims, end
        if kind in ("hole", "wall") and origin in (None, "player"):
            return [Claim(("beside", direction), kind) for direction in directions], end
        return (), end

    def _beside(self, place: int) -> tuple[Sequence[Claim], int]:
        """Read "Down is a hole", "left and right are walls", "below me is ice"."""
        directions, place = self._list(place)
        origin, place = self._reference(place)
        if origin not in (None, "player") or self._at(place) not in _COPULAS:
            return (), place
        place += 1
        while self._at(place) in _ARTICLES or self._at(place) in _COPULAS:
            place += 1
        token = self._at(place)
        value = STATES.get(token) if isinstance(token, str) else None
        value = value or (self._kinds[place] if place < len(self._tokens) else None)
        if value is None or value == "player":
            return (), place
        return [Claim(("beside", direction), value) for direction in directions], place + 1

    def _cannot(self, place: int) -> tuple[Sequence[Claim], int]:
        """Read the words after "cannot" in "I cannot go left"."""
        if self._at(place) in _GO and self._at(place + 1) in DIRECTIONS:
            return [Claim(("beside", DIRECTIONS[str(self._at(place + 1))]), "blocked")], place + 2
        return (), place

    # --- their parts ---

    def _list(self, place: int) -> tuple[list[str], int]:
        """Read one or two directions, with or without "and". A second one that begins a new claim is left unread."""
        directions = [DIRECTIONS[str(self._at(place))]]
        place += 1
        next_place = place + (self._at(place) in ("and", "-", "/"))
        while self._at(next_place) in ("the", "to"):
            next_place += 1
        if self._at(next_place) in DIRECTIONS:
            has_copula = self._at(next_place + 1) in _COPULAS
            has_filler = self._at(place - 2) in _FILLERS if place > 1 else False
            if not (has_copula and has_filler):
                directions.append(DIRECTIONS[str(self._at(next_place))])
                place = next_place + 1
        return directions, place

    def _reference(self, place: int) -> tuple[str | None, int]:
        """Read the thing from which a direction is seen, such as "of the box" or "me"; None if it is not named."""
        start = place
        if self._at(place) in ("of", "from"):
            place += 1
        while self._at(place) in ("the", "my", "a"):
            place += 1
        if self._at(place) in _ME:
            return "player", place + 1
        kind = self._kinds[place] if place < len(self._tokens) else None
        if kind in ("box", "goal", "target") and place > start:
            return kind, place + 1
        return None, start

    def _at(self, place: int) -> Token:
        return self._tokens[place] if 0 <= place < len(self._tokens) else "."

    def _denied(self, place: int) -> bool:
        """Return whether a noun is negated ("not a hole", "no box"). Negated statements say too little to count."""
        index = place - 1
        while self._at(index) in ("a", "an", "the", "any"):
            index -= 1
        token = self._at(index)
        return isinstance(token, str) and _NOT.match(token) is not None

    def _noun(self, word: str) -> str | None:
        kind = NOUNS.get(word.lower().removesuffix("'s"))
        if kind is None and len(word) == 1 and word not in "AIai":
            return self._symbol(word)
        return self._alias.get(kind, kind) if kind else None

    def _symbol(self, symbol: str) -> str | None:
        kinds = self._legend.get(symbol, frozenset())
        for kind in ("player", "box", "goal", "hole", "wall", "target"):
            if kind in kinds:
                return kind
        return "plain" if kinds else None
