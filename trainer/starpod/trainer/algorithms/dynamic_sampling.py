"""Groups that teach nothing, and so are asked for again (DAPO's dynamic sampling, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

from starpod.trainer.algorithms.filters import ZERO
from starpod.trainer.algorithms.sections import DynamicSamplingConfig
from starpod.trainer.data.episode import Group


def needs_reask(config: DynamicSamplingConfig, groups: Sequence[Group]) -> list[bool]:
    """Whether each group's returns are all the same, so that another start state should take its place."""
    return [config.enabled and group.reward_std <= ZERO for group in groups]
