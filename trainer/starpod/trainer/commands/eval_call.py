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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from starpod.client import BadArgument, Limits, StarpodError, UnknownVersion, Unreachable
from starpod.client.programs import ServiceFailed
from starpod.client.transport import Transport
from starpod.report.console import safe_console
from starpod.trainer.agents.base import AgentRefused, Sampling
from starpod.trainer.commands.eval_environments import EnvironmentChoice, Servers
from starpod.trainer.commands.eval_models import Engine, EvaluatedModel, find_model, incomplete_call, is_model
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.files import BadEpisodes
from starpod.trainer.evaluation.folder import BadFolder, EvaluationFolder
from starpod.trainer.evaluation.plan import EvaluationPlan, PlanDiffers
from starpod.trainer.evaluation.player import Missing, PlanPlayer, missing_in
from starpod.trainer.evaluation.table import evaluation_report
from starpod.trainer.output.files import FolderLocked
from starpod.v1.environment_word import EnvironmentWord, WordError

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
    access: Transport
    retry_failed: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EvaluationCall:
        """Return the call with these values of the command's parameters. Raises UsageError."""
        models, environments, address = split_words(options["words"], options["environments"])
        limits = Limits(options["turns"], options["actions_per_turn"], options["actions"])
        return cls(
            models=models,
            environments=EnvironmentChoice(
                words=environments,
                address=address,
                assignments=options["assignments"],
                version=options["version"],
                limits=limits,
            ),
            sampling=Sampling(options["temperature"], options["max_tokens"], options["thinking"]),
            **{name: options[name] for name in ("seed", "episodes", "attempts", "engine", "concurrency", "access")},
            retry_failed=options["retry_failed"],
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
        models = {word: find_model(word, sampling, self.engine, self.concurrency) for word in self.models}
        async with AsyncExitStack() as stack:
            servers = Servers(stack, self.access)
            plan = await self._plan(list(models.values()), known, sampling, servers)
            missing = missing_in(folder, plan, retry_failed=self.retry_failed)
            for word in dict.fromkeys(model for model, _ in missing if model not in models):
                models[word] = find_model(word, sampling, self.engine, self.concurrency)
                plan = plan.extended(dataclasses.replace(plan, models={word: models[word].facts}))
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
        for model in models:
            if {task.environment.id for task in model.tasks} & {
                each.task.environment for each in environments.values()
            }:
                _warn_of_used_seeds(model, plan.seeds)
        return known.extended(plan) if known else plan


def split_words(words: Sequence[str], environments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the models, the environments and the server's address in the words of a call.

    A word HOST:PORT is a server, at which --environment is looked up. Without --environment, the last of several words
    is the environment unless it can only be a model.
    """
    addresses = [word for word in words if _address(word) and not EnvironmentWord.parse(word).name]
    models = [word for word in words if word not in addresses]
    if len(addresses) > 1:
        raise click.UsageError(f"name one server, several with commas between them: {','.join(addresses)}")
    if not environments and not addresses and len(models) > 1 and not is_model(models[-1]):
        environments = [models.pop()]
    return tuple(dict.fromkeys(models)), tuple(environments), "".join(addresses)


def _address(word: str) -> str:
    try:
        return EnvironmentWord.parse(word).addresses
    except WordError:
        return ""


async def _play(
    folder: EvaluationFolder,
    plan: EvaluationPlan,
    missing: Missing,
    models: Mapping[str, EvaluatedModel],
    servers: Servers,
) -> None:
    """Play what is missing, and show the progress on a terminal."""
    console = safe_console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    needed = dict.fromkeys(environment for _, environment in missing)
    fleets = {name: await servers.fleet(plan.environments[name].source) for name in needed}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {
            (model, name): progress.add_task(
                f"{model}, {name}", total=sum(len(start.members or ()) for start in starts)
            )
            for (model, name), starts in missing.items()
        }
        player = PlanPlayer(folder, plan, missing, fleets, lambda model, name: progress.advance(bars[model, name]))
        for model in dict.fromkeys(model for model, _ in missing):
            async with models[model].opened() as agents:
                await player.play(model, agents)


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
    except (ConfigError, ServiceFailed, StarpodError, AgentRefused, UserCodeError) as error:
        raise click.ClickException(str(error)) from error
    except (BadFolder, BadEpisodes, OSError) as error:
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
