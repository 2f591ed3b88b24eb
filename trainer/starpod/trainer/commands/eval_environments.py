"""The environments that a call of `starpod eval` names: what serves them, and the task that all models play."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import click

from starpod.client import Fleet, Limits
from starpod.client.programs import start_server
from starpod.client.transport import Transport
from starpod.client.versions import latest_name
from starpod.remote.catalog import find_environment, parse_options, service_errors
from starpod.trainer.agents.base import Task
from starpod.trainer.commands.eval_models import EvaluatedModel, incomplete_call
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.evaluation.plan import PlannedEnvironment
from starpod.trainer.rollout.environment import fit_task, serve_words
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord, WordError


@dataclass(frozen=True, slots=True)
class Servers:
    """Connections to servers of environments. They last until the stack closes."""

    stack: AsyncExitStack
    access: Transport
    _fleets: dict[str, Fleet] = field(default_factory=dict)

    async def fleet(self, source: str) -> Fleet:
        """Return the fleet of a `PlannedEnvironment.source`. Servers are started unless the source is an address."""
        if source not in self._fleets:
            words = shlex.split(source)
            address = EnvironmentWord.parse(words[0]).addresses
            with service_errors():
                address = address or self.stack.enter_context(start_server(*words, again=True))
            try:
                fleet = Fleet(address, token=self.access.token, tls=self.access.tls)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="ADDRESS") from error
            self._fleets[source] = await self.stack.enter_async_context(fleet)
        return self._fleets[source]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChoice:
    """The words and options that choose and set environments."""

    words: tuple[str, ...]
    """Each is a word of the command line, the name of an environment in a run or folder, perhaps at an address, or an
    address alone, which serves all of the runs. Empty: all of the runs, or else of the folder."""
    assignments: tuple[str, ...]
    """Options as [ENV:]KEY=VALUE."""
    version: str
    limits: Limits

    @property
    def given(self) -> bool:
        """Whether the call says anything about environments."""
        return bool(self.words or self.assignments or self.version or self.limits != Limits())

    async def resolve(
        self, models: Sequence[EvaluatedModel], known: Mapping[str, PlannedEnvironment], servers: Servers
    ) -> dict[str, PlannedEnvironment]:
        """Return the environments by name. One that is named twice is played once.

        Args:
            models: The models. What the call leaves open is taken from their runs.
            known: Environments of the folder. They supply what is open otherwise.
        """
        run_tasks: dict[str, TaskConfig] = {}
        for task in (task for model in models for task in model.tasks):
            run_tasks.setdefault(task.name or task.environment.id, task)
        specs: dict[str, tuple[pb.EnvironmentSpec, str, list[pb.EnvironmentSpec]]] = {}
        for word in map(_parse, self.words or ("",)):
            is_open = not (word.id or word.serve)
            for name in [*run_tasks] or [*known] or [""] * bool(word.addresses) if is_open else [word.id]:
                id, source = _default(run_tasks.get(name), known.get(name)) or (word.id, shlex.quote(word.serve))
                source = word.addresses or source
                hosted = await (await servers.fleet(source)).describe()
                spec = find_environment(hosted, id, self.version)
                specs[name if name in run_tasks or name in known else spec.id] = spec, source, hosted
        if not specs:
            raise incomplete_call(models[0].name if models else "")
        options = self._options({name: spec.id for name, (spec, *_) in specs.items()})
        environments = {}
        for name, (newest, source, hosted) in specs.items():
            task_name = name if name in run_tasks and run_tasks[name].name else ""
            wanted = Task(newest.id, self.version, limits=self.limits, name=task_name)
            ranges = (fit.version for fit in _fits(wanted, models, known.get(name)).values())
            spec = find_environment(hosted, newest.id, next(filter(None, ranges), ""))
            values, actions = parse_options(spec, options[name]), tuple(spec.action_space.names)
            fitted = _fitted(replace(wanted, options=values, actions=actions), models, known.get(name))
            # Episodes of a newer version would later be counted in the same row.
            fitted = replace(fitted, version=f"=={spec.version}")
            environments[fitted.name or fitted.environment] = PlannedEnvironment(fitted, source)
        return environments

    def _options(self, ids: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the assignments of options for each environment. One with a prefix is for that environment alone."""
        options: dict[str, list[str]] = {name: [] for name in ids}
        for assignment in self.assignments:
            prefix, colon, option = assignment.partition(":")
            if not colon or "=" in prefix:
                prefix, option = "", assignment
            id = latest_name(prefix, [*ids.values()])
            targets = [name for name in ids if not prefix or prefix == name or id == ids[name]]
            if not targets:
                raise click.BadParameter(f"{assignment!r} is for {prefix}, which is not played", param_hint="--option")
            for name in targets:
                options[name].append(option)
        return options


def _default(run_task: TaskConfig | None, known: PlannedEnvironment | None) -> tuple[str, str] | None:
    """Return the id and the source of an environment of a run or of the folder."""
    if run_task is not None:
        config = run_task.environment
        return config.id, ",".join(config.addresses) or shlex.join(serve_words([config.to_dict()]))
    return (known.task.environment, known.source) if known is not None else None


def _parse(word: str) -> EnvironmentWord:
    try:
        return EnvironmentWord.parse(word) if word else EnvironmentWord("")
    except WordError as error:
        raise click.BadParameter(str(error), param_hint="--environment") from error


def _fits(task: Task, models: Sequence[EvaluatedModel], known: PlannedEnvironment | None) -> dict[str, Task]:
    """Return the task with its unset values from each model's run, by model, or otherwise once from the folder."""
    fits = {model.name: fit for model in models if (fit := fit_task(task, model.tasks)) is not None}
    return fits or {"": task.with_defaults(known.task) if known else task}


def _fitted(task: Task, models: Sequence[EvaluatedModel], known: PlannedEnvironment | None) -> Task:
    """Return the task with its unset values from the models' runs, or otherwise from the folder.

    Raises UsageError if two runs play the environment in different ways, because all models play the same.
    """
    fitted = _fits(task, models, known)
    settings = {name: PlannedEnvironment(fit, "").settings() for name, fit in fitted.items()}
    for name, values in settings.items():
        for key, value in next(iter(settings.values())).items():
            if values[key] != value:
                raise click.UsageError(
                    f"all models play the same, but the runs differ in the {key} of {task.environment}: {value} in "
                    f"{next(iter(settings))}, {values[key]} in {name}; set it in the call, or evaluate them apart"
                )
    return next(iter(fitted.values()))
