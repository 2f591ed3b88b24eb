"""The 2x2x2 cube: its 24 stickers, its quarter turns, and states that differ only by how the cube is held."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

FACES = "ULFRBD"
"""Up, left, front, right, back, down: their order in a state."""
COLOURS = "WOGRBY"
"""White, orange, green, red, blue, yellow: the colour of each face of a solved cube."""
ACTIONS = tuple(face + turn for face in "UDLRFB" for turn in ("", "'"))
"""Quarter turns in Singmaster's notation: clockwise as seen from outside, counter-clockwise with a prime."""

Vector = tuple[int, int, int]
Cube = bytes
"""Colours (0 to 5) of the stickers: face by face, of each the top left, top right, bottom left and bottom right one, as
on a net with the front in the middle and the back to the right of the right face."""

SOLVED: Cube = bytes(face for face in range(6) for _ in range(4))

# Of each face: the direction that it looks to, and on the net its right and its down. x is right, y up, z front.
_FRAMES: dict[str, tuple[Vector, Vector, Vector]] = {
    "U": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "L": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "F": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "R": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "B": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
    "D": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
}


def _dot(a: Vector, b: Vector) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _cross(a: Vector, b: Vector) -> Vector:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _turned(vector: Vector, axis: Vector) -> Vector:
    """A quarter turn clockwise, as seen by one who looks at the face from outside."""
    along, across = _dot(vector, axis), _cross(vector, axis)
    x, y, z = (along * unit + moved for unit, moved in zip(axis, across, strict=True))
    return x, y, z


def _stickers() -> list[tuple[Vector, Vector]]:
    """The corner and the direction of each sticker, in a state's order."""
    stickers = []
    for face in FACES:
        normal, right, down = _FRAMES[face]
        for below, beside in itertools.product((-1, 1), repeat=2):
            x, y, z = (n + beside * r + below * d for n, r, d in zip(normal, right, down, strict=True))
            stickers.append(((x, y, z), normal))
    return stickers


_STICKERS = _stickers()


def _permutation(face: str, whole: bool = False) -> tuple[int, ...]:
    """From which place each sticker comes in a clockwise turn of a face, or of the whole cube about its axis."""
    axis = _FRAMES[face][0]
    sources = list(range(24))
    for source, (corner, normal) in enumerate(_STICKERS):
        if whole or _dot(corner, axis) > 0:
            sources[_STICKERS.index((_turned(corner, axis), _turned(normal, axis)))] = source
    return tuple(sources)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(place) for place in range(24))


TURNS = {
    face + prime: _inverse(sources) if prime else sources
    for face in FACES
    for sources in (_permutation(face),)
    for prime in ("", "'")
}


def permute(cube: Cube, sources: Sequence[int]) -> Cube:
    """The cube whose every place has the sticker that was at `sources` of it."""
    return bytes([cube[source] for source in sources])


def turn(cube: Cube, action: str) -> Cube:
    """The cube after a quarter turn."""
    return permute(cube, TURNS[action])


def is_solved(cube: Cube) -> bool:
    """Whether every face has one colour, however the cube is held."""
    return all(cube[first : first + 4] == cube[first : first + 1] * 4 for first in range(0, 24, 4))


def _orientations() -> list[tuple[int, ...]]:
    """The 24 ways to hold a cube, as permutations of its stickers."""
    turns = _permutation("U", whole=True), _permutation("F", whole=True)
    found = [tuple(range(24))]
    for held in found:
        for sources in turns:
            further = tuple(held[source] for source in sources)
            if further not in found:
                found.append(further)
    return found


# The three stickers of the corner down, back, left: the one that the turns of U, R and F never move.
_CORNER = tuple(_STICKERS.index(((-1, -1, -1), _FRAMES[face][0])) for face in "DBL")
_ORIENTATIONS = {tuple(held[place] for place in _CORNER): held for held in _orientations()}


def hold(cube: Cube) -> Cube:
    """The cube held so that the corner of its down, back and left colours is in place: the same however it was held."""
    wanted = tuple(FACES.index(face) for face in "DBL")
    for places, held in _ORIENTATIONS.items():
        if tuple(cube[place] for place in places) == wanted:
            return permute(cube, held)
    raise ValueError("no corner has the colours of the down, back and left faces")
