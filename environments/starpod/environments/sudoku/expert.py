"""The expert: the right digit for a cell that accepts it."""

from __future__ import annotations

from .grid import Grid, candidates, clashes, peers


def expert_placement(grid: Grid, solution: Grid, size: int, *, free_for_all: bool) -> tuple[int, int] | None:
    """Return the first cell that accepts its right digit, and that digit. Cells with wrong digits come first.

    If wrong digits block each other, return a placement that replaces one of them by a third digit, or None.

    Args:
        grid: the grid, which is not solved.
        free_for_all: whether a digit can be placed that clashes with others.
    """
    wrong_cells = [cell for cell, digit in enumerate(grid) if digit and digit != solution[cell]]
    cells = wrong_cells + [cell for cell, digit in enumerate(grid) if not digit]
    for cell in cells:
        if free_for_all or not clashes(grid, size, cell, solution[cell]):
            return cell, solution[cell]
    for cell in cells:
        blockers = [peer for peer in peers(size)[cell] if grid[peer] == solution[cell]]
        if len(blockers) == 1:
            for number in candidates(grid, size, blockers[0]):
                if number != grid[blockers[0]]:
                    return blockers[0], number
    return None
