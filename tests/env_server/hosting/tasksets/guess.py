"""A taskset of verifiers with an environment of its own, which talks with the agent over several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessTaskset(vf.Taskset[GuessTask]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(10):
            yield GuessTask(GuessData(prompt="Guess my number, from 0 to 9.", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                more = segment.last_reply.isdigit() and int(segment.last_reply) < task.data.number
                segment = await interaction.turn("More." if more else "Less.")
        interaction.trace.record_reward("guessed", float(segment.last_reply == str(task.data.number)))


__all__ = ["GuessEnv", "GuessTaskset"]
