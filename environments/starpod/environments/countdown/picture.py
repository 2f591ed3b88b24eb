"""Drawing of target, numbers and answer, as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from starpod.env_server import Canvas

_INK, _PAPER, _GOLD = (35, 40, 52), (255, 251, 240), (246, 196, 83)


def format_points(points: float) -> str:
    """Format points; whole numbers have no decimal point."""
    return str(int(points)) if points == int(points) else str(points)


def draw_text(numbers: Sequence[int], target: int, answer: str | None, points: float) -> str:
    """Draw the puzzle in lines of text. answer: None before the turn. points: the answer's reward."""
    cells = [f"{number:^{len(str(number)) + 2}}" for number in numbers]
    lines = [
        f"Target {target}",
        "  ".join(f"┌{'─' * len(cell)}┐" for cell in cells),
        "  ".join(f"│{cell}│" for cell in cells),
        "  ".join(f"└{'─' * len(cell)}┘" for cell in cells),
    ]
    if answer is not None:
        lines.append(f"{answer!r}: {format_points(points)} points")
    return "\n".join(lines)


def draw(numbers: Sequence[int], target: int, answer: str | None, points: float, best: float) -> bytes:
    """Draw the puzzle as a PNG of 480 x 300 pixels: target, numbers on cards, and the answer below them.

    Args:
        best: reward of a correct answer, which is shown in green.
    """
    canvas = Canvas(480, 300, (29, 84, 78))
    canvas.box(10, 10, 470, 290, (36, 98, 90), radius=16)
    canvas.box(140, 26, 340, 108, (14, 22, 30), radius=12)
    canvas.box(146, 32, 334, 102, (24, 36, 46), radius=8)
    canvas.text(240, 46, "TARGET", (150, 170, 180), size=12, width=120)
    canvas.text(240, 77, str(target), _GOLD, size=46, width=170)

    width, gap = 76, 14
    left = 240 - (len(numbers) * (width + gap) - gap) / 2
    for index, number in enumerate(numbers):
        x, y = left + index * (width + gap), 130 + 3 * (index % 2)
        canvas.box(x + 3, y + 5, x + width + 3, y + 95, (22, 64, 60), radius=10)
        canvas.box(x, y, x + width, y + 90, _PAPER, radius=10)
        canvas.box(x + 5, y + 5, x + width - 5, y + 85, (244, 236, 216), radius=7)
        canvas.text(x + width / 2, y + 45, str(number), _INK, size=36, width=width - 16)

    if answer is None:
        for index, sign in enumerate("+-*/="):
            canvas.text(120 + 60 * index, 260, sign, (120, 170, 160), size=26, width=30)
    else:
        green, red = (72, 170, 110), (206, 80, 76)
        canvas.box(30, 240, 450, 278, _PAPER, radius=10)
        canvas.box(380, 240, 450, 278, green if points >= best else _GOLD if points > 0 else red, radius=10)
        text = "".join(character if character.isprintable() else " " for character in answer)
        canvas.text(205, 259, text if len(text) <= 60 else text[:59] + "…", _INK, size=20, width=330)
        canvas.text(415, 259, f"{points:g}", _INK, size=20, width=60)
    return canvas.png()
