"""Drawing of the two machines, as text and as a picture. Before the pull, only the names differ."""

from __future__ import annotations

import math

from starpod.env_server import Canvas

_INK, _GOLD, _CREAM = (38, 30, 52), (246, 196, 83), (255, 248, 231)


def draw_text(arms: tuple[str, str], pulled: str | None, payout: float) -> str:
    """Draw the machines from left to right, in lines of text. pulled: None before the turn. payout: the reward."""
    width = max(map(len, arms)) + 4
    rows: list[list[str]] = []
    for arm in arms:
        window = "? ? ?" if arm != pulled else f"{payout:g}"
        lever = ("( )", " | ", "-' ") if arm != pulled else ("   ", "   ", "-. ")
        rows.append(
            [
                f"╭{'─' * width}╮   ",
                f"│{arm:^{width}}│{lever[0]}",
                f"├{'─' * width}┤{lever[1]}",
                f"│{window:^{width}}│{lever[2]}",
                f"╰{'─' * width}╯{'( )' if arm == pulled else '   '}",
            ]
        )
    return "\n".join("    ".join(pieces).rstrip() for pieces in zip(*rows, strict=True))


def draw(arms: tuple[str, str], pulled: str | None, payout: float) -> bytes:
    """Draw the machines as a PNG of 480 x 300 pixels. The arguments are those of `draw_text`."""
    canvas = Canvas(480, 300, (52, 41, 79))
    for left in range(-160, 600, 40):  # a backdrop of slanted stripes
        canvas.polygon(left, 0, left + 20, 0, left - 100, 300, left - 120, 300, fill=(58, 46, 88))
    canvas.box(0, 262, 480, 300, (33, 26, 51))
    for index, arm in enumerate(arms):
        amount = payout if arm == pulled else None
        _draw_machine(canvas, 24 + 228 * index, arm, amount, dim=pulled not in (None, arm))
    return canvas.png()


def _draw_machine(canvas: Canvas, x: int, name: str, payout: float | None, dim: bool) -> None:
    body, shade = ((122, 108, 140), (96, 84, 112)) if dim else ((214, 64, 84), (164, 40, 64))

    # The lever: up while unused, down after the pull.
    top = 182 if payout is not None else 62
    canvas.box(x + 168, 128, x + 186, 150, (150, 150, 168), radius=4)
    canvas.line(x + 182, 139, x + 190, top, fill=(196, 196, 212), width=6)
    canvas.ellipse(x + 178, top - 12, x + 202, top + 12, (240, 92, 92))
    canvas.ellipse(x + 183, top - 8, x + 190, top - 1, (255, 190, 190))

    # The case, with the arm's name.
    canvas.box(x, 250, x + 174, 268, shade, radius=6)
    canvas.box(x + 8, 34, x + 166, 256, shade, radius=18)
    canvas.box(x + 8, 34, x + 166, 248, body, radius=18)
    canvas.box(x + 18, 44, x + 156, 82, _CREAM, radius=10)
    canvas.text(x + 87, 63, name, _INK, size=22, width=130)

    # The window: three reels, or what was paid.
    canvas.box(x + 18, 94, x + 156, 170, _INK, radius=10)
    if payout is None:
        for left in (x + 24, x + 67, x + 110):
            canvas.box(left, 100, left + 40, 164, _CREAM, radius=6)
            canvas.text(left + 20, 132, "?", (170, 160, 180) if dim else body, size=40, width=40)
    else:
        canvas.box(x + 24, 100, x + 150, 164, _GOLD if payout > 0 else _CREAM, radius=6)
        canvas.text(x + 87, 132, f"{payout:g}", _INK, size=46, width=110)

    # The tray, with coins in proportion.
    canvas.box(x + 32, 190, x + 142, 238, _INK, radius=10)
    coins = 0 if payout is None or payout <= 0 else max(1, min(5, math.ceil(5 * payout)))
    for coin in range(coins):
        left, top = x + 44 + 18 * coin, 208 - 3 * (coin % 2)
        canvas.ellipse(left, top, left + 22, top + 22, (196, 140, 40))
        canvas.ellipse(left + 2, top + 1, left + 20, top + 19, _GOLD)
