"""The grid as HTML and as a picture, with initial digits in bold and clashing digits in red."""

from __future__ import annotations

import math
from collections.abc import Collection

from starpod.env_server import Canvas


def draw_html(puzzle: bytes, grid: bytes, size: int, clashing: Collection[int]) -> str:
    """Return the grid as an HTML table.

    Args:
        puzzle: the given digits, which are bold.
        clashing: indices of the cells whose digits are red.
    """
    side = math.isqrt(size)
    rows = []
    for row in range(size):
        cells = []
        for column in range(size):
            cell = row * size + column
            colour = "#c0392b" if cell in clashing else "#222" if puzzle[cell] else "#1f6fc4"
            style = f"width:2em;height:2em;border:1px solid #bbb;text-align:center;color:{colour}"
            if puzzle[cell]:
                style += ";font-weight:bold;background:#f1ede4"
            for edge, index in (("right", column), ("bottom", row)):
                if index % side == side - 1 and index < size - 1:
                    style += f";border-{edge}:2px solid #333"
            cells.append(f'<td style="{style}">{grid[cell] or ""}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table style="border-collapse:collapse;border:2px solid #333">{"".join(rows)}</table>'


def draw(puzzle: bytes, grid: bytes, size: int, clashing: Collection[int]) -> bytes:
    """Draw the grid as a PNG with 48 pixels per cell. The arguments are those of `draw_html`."""
    side, edge, margin = math.isqrt(size), 48, 16
    end = margin + size * edge
    canvas = Canvas(end + margin, end + margin, "#faf8f3", smoothing=1)
    for cell, digit in enumerate(grid):
        row, column = divmod(cell, size)
        left, top = margin + column * edge, margin + row * edge
        is_shaded = (row // side + column // side) % 2 == 0
        paper, ink = "#f1ede2" if is_shaded else "#ffffff", "#2b2b33" if puzzle[cell] else "#1f6fc4"
        if cell in clashing:
            paper, ink = "#f9d6d1", "#b3261e"
        canvas.box(left, top, left + edge, top + edge, paper)
        if digit:
            size_of_text = 28 if size < 10 else 22
            canvas.text(left + edge / 2, top + edge / 2, str(digit), ink, size=size_of_text, bold=bool(puzzle[cell]))
    for index in sorted(range(size + 1), key=lambda index: index % side == 0):  # thick lines last
        is_heavy, ruler = index % side == 0, margin + index * edge
        for line in ((margin, ruler, end, ruler), (ruler, margin, ruler, end)):
            canvas.line(*line, fill="#3b3a45" if is_heavy else "#cfc9bb", width=3 if is_heavy else 1)
    return canvas.png()
