"""The environments that a call of `starpod eval` names: what serves them, and the task that all models play."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import click

from starpod.client import Fleet, Limits
from starpod.client.programs import start_server
from starpod.client.transport import Transport
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
    """Each names an environment: a word of the command line, or the name of one in a run or folder. Empty: all of the
    runs, or else of the folder."""
    address: str
    """Server at which the words are looked up; "" without one."""
    assignments: tuple[str, ...]
    """Options as [ENV:]KEY=VALUE."""
    version: str
    limits: Limits

    @property
    def given(self) -> bool:
        """Whether the call says anything about environments."""
        return bool(self.words or self.address or self.assignments or self.version or self.limits != Limits())

    async def resolve(
        self, models: Sequence[EvaluatedModel], known: Mapping[str, PlannedEnvironment], servers: Servers
    ) -> dict[str, PlannedEnvironment]:
        """Return the environments by name. One that is named twice is played once.

        Args:
            models: The models. What the call leaves open is taken from their runs.
            known: Environments of the folder. They supply what is open otherwise.
            servers: Connections to the servers.
        """
        all_tasks = [task for model in models for task in model.tasks]
        run_tasks = {task.name or task.environment.id: task for task in reversed(all_tasks)}
        specs: dict[str, tuple[pb.EnvironmentSpec, str, Sequence[pb.EnvironmentSpec]]] = {}
        for word in self.words or [*reversed(run_tasks)] or [*known] or [""] * bool(self.address):
            source = self._source(word, run_tasks.get(word), known.get(word))
            hosted = await (await servers.fleet(source)).describe()
            spec = find_environment(hosted, self._id(word, run_tasks, known), self.version)
            specs[word if word in run_tasks or word in known else spec.id] = spec, source, hosted
        if not specs:
            raise incomplete_call(models[0].name if models else "")
        all_specs = [spec for _, _, hosted in specs.values() for spec in hosted]
        options = self._options({name: spec for name, (spec, _, _) in specs.items()}, all_specs)
        environments = {}
        for name, (spec, source, _) in specs.items():
            values, actions = parse_options(spec, options[name]), tuple(spec.action_space.names)
            task_name = name if name in run_tasks and run_tasks[name].name else ""
            task = Task(spec.id, self.version, values, self.limits, actions, task_name)
            task = _fitted(task, models, known.get(name))
            environments[task.name or task.environment] = PlannedEnvironment(task, source)
        return environments

    def _source(self, word: str, run_task: TaskConfig | None, known: PlannedEnvironment | None) -> str:
        if self.address:
            return self.address
        if run_task is not None:
            config = run_task.environment
            return ",".join(config.addresses) or shlex.join(serve_words([config.to_dict()]))
        if known is not None:
            return known.source
        parsed = _parse(word)
        return parsed.addresses or shlex.quote(parsed.serve)

    def _id(self, word: str, run_tasks: Mapping[str, TaskConfig], known: Mapping[str, PlannedEnvironment]) -> str:
        if word in run_tasks:
            return run_tasks[word].environment.id
        if word in known:
            return known[word].task.environment
        return _parse(word).id if word else ""

    def _options(
        self, specs: Mapping[str, pb.EnvironmentSpec], all_specs: Sequence[pb.EnvironmentSpec]
    ) -> dict[str, list[str]]:
        """Return the assignments of options for each environment. One with a prefix is for that environment alone."""
        options: dict[str, list[str]] = {name: [] for name in specs}
        for assignment in self.assignments:
            prefix, colon, option = assignment.partition(":")
            if not colon or "=" in prefix:
                prefix, option, targets = "", assignment, list(specs)
            elif not (targets := [prefix] if prefix in specs else []):
                prefix = find_environment(all_specs, prefix).id
                targets = [name for name, spec in specs.items() if spec.id == prefix]
            if not targets:
                raise click.BadParameter(f"{assignment!r} is for {prefix}, which is not played", param_hint="--option")
            for name in targets:
                options[name].append(option)
        return options


def _parse(word: str) -> EnvironmentWord:
    try:
        return EnvironmentWord.parse(word)
    except WordError as error:
        raise click.BadParameter(str(error), param_hint="--environment") from error


def _fitted(task: Task, models: Sequence[EvaluatedModel], known: PlannedEnvironment | None) -> Task:
    """Return the task with its unset values from the models' runs, or otherwise from the folder.

    Raises UsageError if two runs play the environment in different ways, because all models play the same.
    """
    fitted = {model.name: fit for model in models if (fit := fit_task(task, model.tasks)) is not None}
    settings = {name: PlannedEnvironment(fit, "").settings() for name, fit in fitted.items()}
    for name, values in settings.items():
        for key, value in next(iter(settings.values())).items():
            if values[key] != value:
                raise click.UsageError(
                    f"all models play the same, but the runs differ in the {key} of {task.environment}: {value} in "
                    f"{next(iter(settings))}, {values[key]} in {name}; set it in the call, or evaluate them apart"
                )
    if fitted:
        return next(iter(fitted.values()))
    return task.with_defaults(known.task) if known else task
