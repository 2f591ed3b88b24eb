"""A taskset of verifiers as `vf-init` begins one: a question, an answer, a reward."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break":
            raise ValueError("a bug on purpose")
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def brief(self, trace: vf.Trace) -> float:
        return 0.5 if len(trace.last_reply) < 5 else 0.0

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 5


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterator[SumsTask]:
        for number in range(self.config.num_tasks):
            data = SumsData(prompt=f"{number} + 1 = ?", system_prompt="Be short.", answer=str(number + 1))
            yield SumsTask(data, self.config.task)


__all__ = ["SumsTaskset"]
