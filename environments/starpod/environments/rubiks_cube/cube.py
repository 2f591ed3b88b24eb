"""The 2x2x2 cube: its 24 stickers, quarter turns, and orientations of the whole cube."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

FACES = "ULFRBD"
"""The order of the faces in a state: up, left, front, right, back, down."""
COLOURS = "WOGRBY"
"""Colours of the faces of a solved cube: white, orange, green, red, blue, yellow."""
ACTIONS = tuple(face + turn for face in "UDLRFB" for turn in ("", "'"))
"""Quarter turns in Singmaster's notation: clockwise as seen from outside, counter-clockwise with a prime."""

Vector = tuple[int, int, int]
Cube = bytes
"""Colours (0 to 5) of the stickers, face by face. Each face has its top left, top right, bottom left and bottom right
sticker, as seen on a net with the front in the middle and the back to the right of the right face."""

SOLVED: Cube = bytes(face for face in range(6) for _ in range(4))

# Face -> its normal, and the directions of right and down on the net. x points right, y up, z to the front.
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


def _rotate(vector: Vector, axis: Vector) -> Vector:
    """Rotate a vector by a quarter turn about an axis: clockwise as seen from outside the face with that normal."""
    along, across = _dot(vector, axis), _cross(vector, axis)
    x, y, z = (along * unit + moved for unit, moved in zip(axis, across, strict=True))
    return x, y, z


def _stickers() -> list[tuple[Vector, Vector]]:
    """Return each sticker's corner and normal vector, in the order of a state."""
    stickers = []
    for face in FACES:
        normal, right, down = _FRAMES[face]
        for below, beside in itertools.product((-1, 1), repeat=2):
            x, y, z = (n + beside * r + below * d for n, r, d in zip(normal, right, down, strict=True))
            stickers.append(((x, y, z), normal))
    return stickers


_STICKERS = _stickers()


def _permutation(face: str, whole: bool = False) -> tuple[int, ...]:
    """Return the source index of each sticker in a clockwise turn of a face (or of the whole cube with `whole`)."""
    axis = _FRAMES[face][0]
    sources = list(range(24))
    for source, (corner, normal) in enumerate(_STICKERS):
        if whole or _dot(corner, axis) > 0:
            sources[_STICKERS.index((_rotate(corner, axis), _rotate(normal, axis)))] = source
    return tuple(sources)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(index) for index in range(24))


TURNS = {
    face + prime: _inverse(sources) if prime else sources
    for face in FACES
    for sources in (_permutation(face),)
    for prime in ("", "'")
}


def permute(cube: Cube, sources: Sequence[int]) -> Cube:
    """Permute the stickers: sticker i of the result is sticker `sources[i]` of the cube."""
    return bytes([cube[source] for source in sources])


def turn(cube: Cube, action: str) -> Cube:
    """Return the cube after a quarter turn."""
    return permute(cube, TURNS[action])


def is_solved(cube: Cube) -> bool:
    """Return whether every face has one colour, in any orientation of the cube."""
    return all(cube[start : start + 4] == cube[start : start + 1] * 4 for start in range(0, 24, 4))


def _orientations() -> list[tuple[int, ...]]:
    turns = _permutation("U", whole=True), _permutation("F", whole=True)
    orientations = [tuple(range(24))]
    for orientation in orientations:
        for sources in turns:
            new_orientation = tuple(orientation[source] for source in sources)
            if new_orientation not in orientations:
                orientations.append(new_orientation)
    return orientations


# The three stickers of the corner down, back, left, which turns of U, R and F never move.
_CORNER = tuple(_STICKERS.index(((-1, -1, -1), _FRAMES[face][0])) for face in "DBL")
_ORIENTATIONS = {tuple(orientation[index] for index in _CORNER): orientation for orientation in _orientations()}


def hold(cube: Cube) -> Cube:
    """Rotate the whole cube until the corner with the colours of down, back and left is at the down-back-left place."""
    colours = tuple(FACES.index(face) for face in "DBL")
    for corner, orientation in _ORIENTATIONS.items():
        if tuple(cube[index] for index in corner) == colours:
            return permute(cube, orientation)
    raise ValueError("no corner has the colours of the down, back and left faces")
