"""All tasks of a folder, in Harbor's format, as one environment: `harbor_set:FOLDER`."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import random
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field

from starpod.env_server.authoring.environment import EnvironmentOptions, OptionsError, Unavailable, digest
from starpod.env_server.episodes.errors import shorten
from starpod.env_server.hosting.harbor import SETTINGS, HarborTask, SolvedHarborTask, installed
from starpod.env_server.hosting.harbor import host as host_task
from starpod.env_server.hosting.harbor_task import version_of
from starpod.env_server.hosting.hosted import starpod_id
from starpod.env_server.hosting.request import HostingError, HostingRequest

logger = logging.getLogger(__name__)


class TaskSetOptions(EnvironmentOptions):
    """Options of a task set."""

    task: str = Field(
        default="*",
        max_length=1000,
        description="Pattern for the names of tasks, such as *-1-[0-9]. The episode's seed picks a matching one.",
    )


class HarborTaskSet(SolvedHarborTask):
    """All tasks of a folder as one environment. The seed picks the task of an episode."""

    Options = TaskSetOptions
    tasks: ClassVar[dict[str, type[HarborTask]]]
    names: ClassVar[tuple[str, ...]]
    """All tasks, also those that could not be prepared here: every server picks from the same ones."""

    @classmethod
    def prepare(cls) -> None:
        """Prepare every task. Tasks that cannot be prepared are left out."""
        reasons: dict[str, str] = {}
        for name, member in list(cls.tasks.items()):
            try:
                member.prepare()
            except Unavailable as error:
                reasons[name] = str(error)
                del cls.tasks[name]
        first = next(iter(reasons.values()), "")
        if not cls.tasks:
            raise Unavailable(f"none of its tasks can be served: {first}")
        if reasons:
            logger.warning("%s: without %s: %s", cls.spec.id, ", ".join(reasons), first)

    def reset(self, rng: random.Random) -> None:
        names = fnmatch.filter(self.names, self.options.task)
        # Similar tasks have similar names, and consecutive seeds belong to one iteration of a training run.
        random.Random(0).shuffle(names)
        first = self.seed % len(names) if names else 0
        name = next((name for name in names[first:] + names[:first] if name in self.tasks), "")
        if not name:
            raise OptionsError(
                f"task: no task matches {self.options.task!r}; there are {shorten(', '.join(self.tasks), 200)}"
            )
        self._become(name)
        super().reset(rng)

    def _become(self, name: str) -> None:
        member = self.tasks[name]
        self.task, self.verifier, self.solution = member.task, member.verifier, member.solution
        self.plan = dataclasses.replace(member.plan, environment=self.spec.id)

    def set_state(self, state: dict[str, Any]) -> None:
        self._become(str(state["task"]))
        super().set_state(state)

    def _state(self, seconds: float) -> dict[str, Any]:
        return {**super()._state(seconds), "task": self.task.path.name}


def host(text: str) -> type[HarborTaskSet]:
    """Return the environment of a folder's tasks, `FOLDER#setting=value&...`. Raises HostingError."""
    request = HostingRequest.parse(text, SETTINGS)
    folder, reasons = Path(request.name).resolve(), []
    settings = {"warm": "0", **request.settings}
    shared = "&".join(f"{name}={quote(value)}" for name, value in settings.items() if name != "id")
    tasks: dict[str, type[HarborTask]] = {}
    for path in installed(str(folder)):
        try:
            tasks[Path(path).name] = host_task(f"{path}#{shared}")
        except HostingError as error:
            reasons.append(str(error))
    if not tasks:
        raise request.fail(reasons[0] if reasons else "it is no folder of tasks")
    if reasons:
        logger.warning("%s: cannot host %d of its tasks: %s", folder, len(reasons), reasons[0])
    first = next(iter(tasks.values()))
    spec = dataclasses.replace(
        first.spec,
        id=starpod_id(request, "harbor", folder.name, 1),
        version=version_of(digest("".join(task.spec.version for task in tasks.values()))),
        title=f"Tasks of {folder.name}, in Harbor's format",
    )
    members = {"spec": spec, "tasks": tasks, "names": tuple(sorted(tasks)), "__module__": __name__}
    members["reference"] = (__name__, "host", request.text)
    # All tasks have the settings of the first one.
    return type(HarborTaskSet.__name__, (HarborTaskSet, first), members)
