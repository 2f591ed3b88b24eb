"""A taskset of verifiers with tools, whose state the reward reads."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class CounterState(vf.State):
    count: int = 0


class CounterTools(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, amount: int) -> str:
        """Add an amount to the count."""
        self.state.count += amount
        return f"The count is {self.state.count}."


class CounterConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CounterData(vf.TaskData):
    goal: int


class CounterTask(vf.Task[CounterData, CounterState, CounterConfig]):
    @classmethod
    def toolsets(cls, config: CounterConfig) -> list[vf.Toolset]:
        return [CounterTools(config.tools)]

    @vf.reward
    async def reached(self, trace: vf.Trace) -> float:
        return float(trace.state.count == self.data.goal)


class CounterTasksetConfig(vf.TasksetConfig):
    task: CounterConfig = CounterConfig()


class CounterTaskset(vf.Taskset[CounterTask, CounterTasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[CounterTask]:
        goal = 0
        while True:
            goal += 1
            yield CounterTask(CounterData(prompt=f"Count to {goal}.", goal=goal), self.config.task)


__all__ = ["CounterTaskset"]

if __name__ == "__main__":
    CounterTools.run()
