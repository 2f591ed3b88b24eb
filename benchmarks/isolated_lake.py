"""A frozen lake in a process of its own, which costs a process to open and one to close.

starpod serve --environment-module benchmarks/isolated_lake.py isolated_lake-v1
"""

from __future__ import annotations

from dataclasses import replace

from starpod.env_server.environment import Concurrency
from starpod.environments.frozen_lake import FrozenLake


class IsolatedLake(FrozenLake):
    """The lake, of class `process`."""

    spec = replace(
        FrozenLake.spec, id="isolated_lake-v1", title="Frozen lake in a process", concurrency=Concurrency.PROCESS
    )
