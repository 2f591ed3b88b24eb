"""Picture of the furniture as a plan, with the contents that the player has seen."""

from __future__ import annotations

import textwrap

from starpod.env_server import Canvas

from .rooms import CLOSED, kind_of
from .state import State

_WOOD, _INK, _PAPER = (226, 206, 176), (48, 40, 34), (252, 248, 240)
_WIDTH, _HEIGHT = 150, 96


def draw(state: State) -> bytes:
    """Draw a PNG with a box for each piece of furniture, five in a row. Closed and unseen contents stay hidden."""
    rows = -(-len(state.places) // 5)
    canvas = Canvas(5 * _WIDTH + 20, rows * _HEIGHT + 84, _WOOD)
    canvas.box(10, 8, 5 * _WIDTH + 10, 38, _PAPER, radius=8)
    canvas.text(5 * _WIDTH / 2 + 10, 23, f"Task: {state.task.ask()}", _INK, size=16, width=5 * _WIDTH - 20)
    for number, place in enumerate(state.places):
        left, top = 10 + number % 5 * _WIDTH, 46 + number // 5 * _HEIGHT
        _draw_place(canvas, state, place, left, top)
    held = f"In the hand: {state.held}" if state.held else "The hands are empty"
    marks = [change for change, things in state.changed.items() if state.held in things]
    canvas.text(
        5 * _WIDTH / 2 + 10, rows * _HEIGHT + 64, ", ".join([held, *(f"{mark}ed" for mark in marks)]), _INK, size=16
    )
    return canvas.png()


def _draw_place(canvas: Canvas, state: State, place: str, left: int, top: int) -> None:
    is_here = place == state.at
    frame = (206, 84, 60) if is_here else (140, 104, 72)
    canvas.box(left + 4, top + 4, left + _WIDTH - 4, top + _HEIGHT - 4, frame, radius=8)
    is_closed = kind_of(place) in CLOSED and place not in state.opened
    colour = (188, 152, 112) if is_closed else _PAPER if place in state.seen else (220, 212, 200)
    canvas.box(left + 8, top + 8, left + _WIDTH - 8, top + _HEIGHT - 8, colour, radius=6)
    canvas.text(left + _WIDTH / 2, top + 20, place, _INK, size=14, width=_WIDTH - 24)
    if is_closed:
        canvas.ellipse(left + _WIDTH / 2 - 5, top + 50, left + _WIDTH / 2 + 5, top + 60, (90, 64, 40))
    elif place in state.seen:
        things = [*state.inside(place), *(["desklamp 1"] if place == "desk 1" else [])]
        for row, line in enumerate(textwrap.wrap(", ".join(things), 22)[:4]):
            canvas.text(left + _WIDTH / 2, top + 38 + 14 * row, line, (96, 70, 50), size=11, width=_WIDTH - 20)
    else:
        canvas.text(left + _WIDTH / 2, top + 54, "?", (150, 140, 130), size=24)
    if is_here:
        canvas.ellipse(left + 14, top + _HEIGHT - 30, left + 32, top + _HEIGHT - 12, (206, 84, 60))
