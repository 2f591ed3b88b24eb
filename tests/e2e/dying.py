"""`starpod` with an engine that dies for good; as a program, on one of several ranks."""

import math
import os
from collections.abc import Callable
from typing import Any

from starpod.cli.main import main
from starpod.trainer.engines.base import EngineLost, Reply, Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.run import Run

CALLS = 3
"""That are answered in the phase in which the engine dies."""
PLACE = "STARPOD_TEST_DYING"
"""Variable that says where, as "rank phase step"."""


def let_engine_die(phase: str, step: int, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes the engine of runs in this process fail in the middle of a phase of one step, or in the hand-over."""
    begin, sample, load = getattr(Run, phase), TorchEngine.generate, TorchEngine.load
    left: float = math.inf

    async def begun(run: Run) -> Any:
        nonlocal left
        left = CALLS if run.step == step else math.inf
        return await begin(run)

    async def generate(engine: TorchEngine, request: Request) -> Reply:
        nonlocal left
        left -= 1
        if left < 0:
            raise EngineLost("the engine is dead")
        return await sample(engine, request)

    async def loaded(engine: TorchEngine, version: int, model: Any) -> None:
        if phase == "sync" and left <= CALLS:
            raise EngineLost("the engine is dead")
        await load(engine, version, model)

    patch(Run, phase, begun)
    patch(TorchEngine, "generate", generate)
    patch(TorchEngine, "load", loaded)


if __name__ == "__main__":
    rank, phase, step = os.environ[PLACE].split()
    if os.environ["RANK"] == rank:
        let_engine_die(phase, int(step))
    main()
