"""A taskset of verifiers whose environment has two agents."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf


class PairTask(vf.Task[vf.TaskData]):
    pass


class PairTaskset(vf.Taskset[PairTask]):
    def load(self) -> list[PairTask]:
        return [PairTask(vf.TaskData(prompt="Agree."), self.config.task)]


class PairConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.left.run(task)
        await agents.right.run(task)


__all__ = ["PairEnv", "PairTaskset"]
