"""A call of `starpod eval`: from its words and options to a plan, the missing episodes, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import click

from starpod.client import BadArgument, Limits, StarpodError, UnknownVersion, Unreachable
from starpod.client.programs import ServiceFailed
from starpod.client.transport import Transport
from starpod.trainer.agents.base import AgentRefused, Sampling
from starpod.trainer.commands.eval_environments import EnvironmentChoice, Servers
from starpod.trainer.commands.eval_models import Engine, EvaluatedModel, find_model, incomplete_call, is_environment
from starpod.trainer.commands.eval_tables import progress_bars
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import BadEpisodes
from starpod.trainer.evaluation.folder import EvaluationFolder, Missing
from starpod.trainer.evaluation.plan import EvaluationPlan, PlanDiffers
from starpod.trainer.evaluation.table import evaluation_report
from starpod.trainer.output.files import FolderLocked
from starpod.trainer.rollout.collect import Collector

EPISODES = 256
"""Default number of start states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCall:
    """The models, environments and settings that a command line names. None means the folder's value, or a default."""

    models: tuple[str, ...]
    environments: EnvironmentChoice
    seed: int | None
    episodes: int | None
    attempts: int | None
    sampling: Sampling
    engine: Engine
    concurrency: int
    agent_port: int
    access: Transport
    retry_failed: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EvaluationCall:
        """Return the call with these values of the command's parameters."""
        models, environments = options["models"], options["environments"]
        if len(models) > 1 and not environments and is_environment(models[-1]):
            models, environments = models[:-1], models[-1:]
        choice = EnvironmentChoice(
            words=environments,
            assignments=options["assignments"],
            version=options["version"],
            limits=Limits(options["turns"], options["actions_per_turn"], options["actions"]),
        )
        names = ("seed", "episodes", "attempts", "engine", "concurrency", "agent_port", "access", "retry_failed")
        return cls(
            models=tuple(dict.fromkeys(models)),
            environments=choice,
            sampling=Sampling(options["temperature"], options["max_tokens"], options["thinking"]),
            **{name: options[name] for name in names},
        )

    def run(self, folder: EvaluationFolder) -> dict[str, Any]:
        """Play what the folder lacks, and return the report. Raises ClickException."""
        with _readable_errors(folder), folder.writing():
            known = folder.read_plan() if folder.exists else None
            if not self.models and known is None:
                raise incomplete_call()
            return asyncio.run(self._run(folder, known))

    async def _run(self, folder: EvaluationFolder, known: EvaluationPlan | None) -> dict[str, Any]:
        sampling = self.sampling
        if known is not None:
            values = {name: value for name, value in dataclasses.asdict(sampling).items() if value is not None}
            sampling = dataclasses.replace(known.sampling, **values)
        models = {
            word: find_model(word, sampling, self.engine, self.concurrency, self.agent_port) for word in self.models
        }
        async with AsyncExitStack() as stack:
            servers = Servers(stack, self.access)
            plan = await self._plan(list(models.values()), known, sampling, servers)
            missing = folder.missing(plan, retry_failed=self.retry_failed)
            for word in dict.fromkeys(model for model, _ in missing if model not in models):
                models[word] = find_model(word, sampling, self.engine, self.concurrency, self.agent_port)
                plan = plan.extended(dataclasses.replace(plan, models={word: models[word].facts}))
            played = {environment.task.environment for environment in plan.environments.values()}
            for model in models.values():
                if played & {task.environment.id for task in model.tasks}:
                    _warn_of_used_seeds(model, plan.seeds)
            folder.write_plan(plan)
            await _play(folder, plan, missing, models, servers)
        return evaluation_report(folder, plan)

    async def _plan(
        self, models: Sequence[EvaluatedModel], known: EvaluationPlan | None, sampling: Sampling, servers: Servers
    ) -> EvaluationPlan:
        """Return the plan of this call, joined with the folder's."""
        known_environments = known.environments if known else {}
        environments = known_environments
        if models or self.environments.given:
            environments = await self.environments.resolve(models, known_environments, servers)
        episodes = self.episodes or (known.episodes if known else EPISODES)
        seed = known.seed if known and self.seed is None else self.seed
        plan = EvaluationPlan(
            seed=_first_seed(models, episodes) if seed is None else seed,
            episodes=episodes,
            attempts=self.attempts or (known.attempts if known else 1),
            sampling=sampling,
            models={model.name: model.facts for model in models},
            environments=environments,
        )
        return known.extended(plan) if known else plan


async def _play(
    folder: EvaluationFolder,
    plan: EvaluationPlan,
    missing: Missing,
    models: Mapping[str, EvaluatedModel],
    servers: Servers,
) -> None:
    """Play what is missing, and show the progress on a terminal."""
    needed = dict.fromkeys(environment for _, environment in missing)
    fleets = {name: await servers.fleet(plan.environments[name].source) for name in needed}
    with progress_bars() as progress:
        bars = {
            (model, name): progress.add_task(
                f"{model}, {name}", total=sum(len(start.members or ()) for start in starts)
            )
            for (model, name), starts in missing.items()
        }
        for model in dict.fromkeys(model for model, _ in missing):
            async with models[model].opened() as agents:
                for name, environment in plan.environments.items():
                    if (starts := missing.get((model, name))) is None:
                        continue

                    def keep(episode: Episode, model: str = model, name: str = name) -> None:
                        folder.append(plan, model, episode)
                        progress.advance(bars[model, name])

                    collector = Collector(fleet=fleets[name], agents=agents, task=environment.task, watch=keep)
                    await collector.collect(starts, plan.attempts, min_size=0)


@contextlib.contextmanager
def _readable_errors(folder: EvaluationFolder) -> Iterator[None]:
    """Report errors of servers, models, configurations and the folder as errors of the command."""
    try:
        yield
    except Unreachable as error:
        raise click.ClickException(f"no server answers ({error}); start one with: starpod serve") from error
    except (BadArgument, UnknownVersion) as error:
        raise click.UsageError(str(error)) from error
    except PlanDiffers as error:
        raise click.UsageError(
            f"{folder.path} has episodes of another plan ({error}): leave these options out, or choose another folder "
            "with --to"
        ) from error
    except FolderLocked as error:
        raise click.ClickException(f"{error} plays in {folder.path}: wait for it, or stop it") from error
    except (ConfigError, ServiceFailed, StarpodError, AgentRefused, UserCodeError, BadEpisodes, OSError) as error:
        raise click.ClickException(str(error)) from error


def _first_seed(models: Sequence[EvaluatedModel], episodes: int) -> int:
    """Return the first seed of the runs' final evaluations, or of the default ones. Raises UsageError."""
    runs = [model for model in models if model.tasks] or models
    try:
        firsts = {model.name: model.seeds.held_out("final", episodes).start for model in runs}
    except ValueError as error:
        raise click.BadParameter(f"{error}; give --seed to play others", param_hint="--episodes") from error
    if len(set(firsts.values())) > 1:
        raise click.UsageError(f"the runs hold out different seeds ({firsts}): give --seed")
    return next(iter(firsts.values()))


def _warn_of_used_seeds(model: EvaluatedModel, played_seeds: range) -> None:
    training_warning = "it may have been trained on these start states"
    seeds = model.seeds
    for name, span, meaning in (
        ("train", seeds.train, training_warning),
        ("warmstart", seeds.warmstart, training_warning),
        ("selection", seeds.selection, "its best checkpoint was chosen on these start states"),
    ):
        if played_seeds.start < span.stop and span.start < played_seeds.stop:
            click.echo(
                f"Warning: seeds {played_seeds.start} to {played_seeds.stop - 1} reach into seeds.{name} of "
                f"{model.name} ({span.start} to {span.stop - 1}): {meaning}; without --seed they are held out",
                err=True,
            )
