"""Something happens in the middle of a run; as a program, an engine dies on one of several ranks."""

import math
import os
from collections.abc import Callable
from typing import Any

from starpod.cli.main import main
from starpod.trainer.engines.base import EngineLost, Reply, Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.run.run import Run

CALLS = 3
"""Replies that are sampled in the phase before it happens."""
PLACE = "STARPOD_TEST_DYING"
"""Variable that says where the engine dies, as "rank phase step"."""


def disturb(phase: str, step: int, action: Callable[[], object], patch: Callable[[Any, str, Any], None]) -> None:
    """Calls `action` in the middle of a phase of one step of a run in this process, again if it returns False."""
    begin, sample = getattr(Run, phase), TorchEngine.generate
    left: float = math.inf

    async def begun(run: Run) -> Any:
        nonlocal left
        left = CALLS if run.progress.step == step else math.inf
        return await begin(run)

    async def generate(engine: TorchEngine, request: Request) -> Reply:
        nonlocal left
        left -= 1
        if left == -1:
            left = 0 if action() is False else math.inf
        return await sample(engine, request)

    patch(Run, phase, begun)
    patch(TorchEngine, "generate", generate)


def die() -> None:
    raise EngineLost("the engine is dead")


if __name__ == "__main__":
    rank, phase, step = os.environ[PLACE].split()
    if os.environ["RANK"] == rank:
        disturb(phase, int(step), die, setattr)
    main()
