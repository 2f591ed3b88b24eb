"""Tasksets of verifiers that cannot be hosted as they are: this one needs a container."""

from __future__ import annotations

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData]):
    pass


class BoxedTaskset(vf.Taskset[BoxedTask]):
    def load(self) -> list[BoxedTask]:
        return [BoxedTask(vf.TaskData(prompt="Mend it.", image="ubuntu:24.04"), self.config.task)]


__all__ = ["BoxedTaskset"]
