"""`starpod eval`: evaluation of a policy on held-out start states."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from starpod.client import BadArgument, Fleet, Limits, StarpodError, UnknownVersion, Unreachable
from starpod.client.programs import ServiceFailed
from starpod.client.transport import Transport
from starpod.remote.catalog import (
    ACCESS,
    JSON,
    VERSION,
    WORD,
    access_options,
    expect_writable,
    find_environment,
    parse_options,
    serving,
)
from starpod.report.console import safe_console
from starpod.serving.options import Command
from starpod.trainer.agents.base import AgentRefused, Sampling, Task
from starpod.trainer.commands.eval_tables import show_comparison, show_report
from starpod.trainer.commands.evaluated_policy import EvaluatedPolicy, find_policy, incomplete_call
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import write_episodes
from starpod.trainer.evaluation.figures import facts_of, renumber_groups, summarise
from starpod.trainer.rollout.collect import Collector, starts_from
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import local_services, serve_words
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord

_LIMIT = "the environment's limit"


@click.command(
    name="eval",
    cls=Command,
    headings={
        "Episodes": ["environments", "episodes", "samples", "seed", "assignments", "version"],
        "Limits": ["turns", "actions_per_turn", "actions"],
        "Replies": ["temperature", "max_tokens", "thinking", "engine", "base_url", "concurrency"],
        "Results": ["compared", "json_file", "episodes_file"],
        "Access to the server": ACCESS,
    },
    epilog="Example: starpod eval runs/lake frozen_lake --episodes 64 --json lake.json",
)
@click.argument("model", metavar="MODEL_OR_CHECKPOINT", required=False)
@click.argument("word", metavar="[ENVIRONMENT]", type=WORD, required=False)
@click.option(
    "--environment",
    "-e",
    "environments",
    metavar="NAME",
    multiple=True,
    help="Environment to play, by default those of the run. Repeatable.",
)
@click.option("--episodes", type=click.IntRange(1), default=256, help="Number of start states, one seed each.")
@click.option("--samples", type=click.IntRange(1), default=1, help="Episodes per start state, for pass@k.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    show_default="a seed that training never uses",
    help="Seed of the first start state; each further one has the next seed.",
)
@click.option(
    "--option",
    "assignments",
    multiple=True,
    metavar="[ENV:]KEY=VALUE",
    help="Option of the environments, or of ENV alone, as JSON; a text needs no quotes. Repeatable.",
)
@VERSION
@click.option("--turns", type=click.IntRange(1), show_default=_LIMIT, help="Maximum turns of an episode.")
@click.option("--actions-per-turn", type=click.IntRange(1), show_default=_LIMIT, help="Maximum actions of a turn.")
@click.option("--actions", type=click.IntRange(1), show_default=_LIMIT, help="Maximum actions of an episode.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    show_default="as in training, else the model's",
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), show_default="as in training, else 400", help="Maximum tokens of a reply."
)
@click.option(
    "--thinking/--no-thinking",
    default=None,
    show_default="as in training",
    help="Whether replies begin with reasoning.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    help="Program that samples. torch: on a CPU or GPU. vllm: faster, needs the extra vllm.",
)
@click.option(
    "--base-url",
    metavar="URL",
    show_default="OpenAI's",
    help="OpenAI-compatible endpoint of openai:MODEL. OPENAI_API_KEY contains its key.",
)
@click.option("--concurrency", type=click.IntRange(1), default=16, help="Maximum requests to the endpoint at a time.")
@click.option(
    "--compare",
    "compared",
    type=click.Path(path_type=Path),
    nargs=2,
    metavar="A B",
    help="Compare two evaluations, episode by episode, and play nothing. A and B are reports of --json, or folders of "
    "runs.",
)
@JSON
@click.option(
    "--jsonl",
    "episodes_file",
    metavar="FILE",
    default="",
    show_default=False,
    help="File for the episodes (.jsonl or .jsonl.gz).",
)
@access_options
@click.pass_context
def evaluate(
    context: click.Context, /, compared: tuple[Path, Path] | None, json_file: str, episodes_file: str, **arguments: Any
) -> None:
    """Play MODEL_OR_CHECKPOINT in ENVIRONMENT and report its success.

    ENVIRONMENT is ADDRESS/NAME at a server (host:port, several with commas), or ADDRESS with --environment. A NAME,
    FILE.py, FILE.py:CLASS or FAMILY:NAME is served during the evaluation. Without ENVIRONMENT, the environments of the
    run are played: at their addresses, or served here if the run started its own servers.

    MODEL_OR_CHECKPOINT is the folder of a run, of a checkpoint or of `starpod export`, which plays as in training; the
    name or folder of another Hugging Face model; openai:MODEL for an OpenAI-compatible endpoint; or a policy without a
    model, which plays one action per turn: random, expert, walk or careful (frozen_lake with local observations), or
    rule (webshop).

    Exit status: 0 done, 1 something failed, such as an episode, 2 usage error.
    """
    expect_writable(json_file, episodes_file)
    if compared:
        show_comparison(*compared, json_file)
        return
    if episodes_file and not episodes_file.endswith((".jsonl", ".jsonl.gz")):
        raise click.BadParameter(f"{episodes_file!r} does not end in .jsonl or .jsonl.gz", param_hint="--jsonl")
    report, episodes_by_task = EvaluationCall(**arguments).play()
    if episodes_file:
        write_episodes(episodes_file, renumber_groups(episodes_by_task))
    show_report(report, json_file)
    failures = [episode.error for episodes in episodes_by_task for episode in episodes if episode.failed]
    if failures:
        raise click.ClickException(f"{len(failures)} episodes failed, the first one with: {failures[0]}")
    context.exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCall:
    """The arguments of a call that plays episodes, by the names of its options."""

    model: str | None
    word: EnvironmentWord | None
    environments: tuple[str, ...]
    episodes: int
    samples: int
    seed: int | None
    assignments: tuple[str, ...]
    version: str
    turns: int | None
    actions_per_turn: int | None
    actions: int | None
    temperature: float | None
    max_tokens: int | None
    thinking: bool | None
    engine: Literal["torch", "vllm"]
    base_url: str | None
    concurrency: int
    access: Transport

    def play(self) -> tuple[dict[str, Any], list[list[Episode]]]:
        """Play the episodes. Return the report, and the episodes of each environment."""
        if not self.model or not (Path(self.model).is_dir() or self.word):
            raise incomplete_call(self.model)
        sampling = Sampling(self.temperature, self.max_tokens, self.thinking)
        policy = find_policy(self.model, sampling, self.engine, self.base_url, self.concurrency)
        names = self._names(policy)
        if not (self.word or (names and policy.served)):
            raise incomplete_call(self.model)
        seeds = self._seeds(policy.seeds)
        choose_tasks = partial(self._tasks, run_tasks=policy.tasks, names=names or [""])
        start_time = perf_counter()
        with self._readable_errors(), serving(self.word) if self.word else _own_service(policy.served) as address:
            try:
                fleet = Fleet(address, token=self.access.token, tls=self.access.tls)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="ADDRESS") from error
            task_results = asyncio.run(_run(fleet, policy, choose_tasks, seeds, self.samples))
        report = {
            "policy": {"kind": policy.kind, "name": policy.name, **policy.agents.facts()},
            "address": address,
            "seeds": [seeds.start, seeds.stop],
            "samples": self.samples,
            "seconds": round(perf_counter() - start_time, 3),
            "environments": {
                task.name or task.environment: {**facts_of(task, results), **summarise(results)}
                for task, results in task_results
            },
        }
        return report, [results for _, results in task_results]

    @contextlib.contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Report errors of servers, policies and configurations as errors of the command."""
        try:
            yield
        except Unreachable as error:
            raise click.ClickException(
                f"no server answers at {self.word and self.word.addresses} ({error}); start one with: starpod serve"
            ) from error
        except (BadArgument, UnknownVersion) as error:
            raise click.UsageError(str(error)) from error
        except (ConfigError, ServiceFailed, StarpodError, AgentRefused, UserCodeError) as error:
            raise click.ClickException(str(error)) from error

    def _names(self, policy: EvaluatedPolicy) -> Sequence[str]:
        """Return the names of the environments to play, in the policy's run or on the server; empty: the only one."""
        if self.word and self.word.id and not self.environments:
            return [self.word.id]
        return self.environments or [name or id for name, id in policy.tasks.items()]

    def _seeds(self, seeds: SeedsConfig) -> range:
        """Return the seeds to play: those from --seed on, or else those of a run's final evaluation."""
        if self.seed is not None:
            return range(self.seed, self.seed + self.episodes)
        try:
            return seeds.held_out("final", self.episodes)
        except ValueError as error:
            raise click.BadParameter(f"{error}; give --seed to play others", param_hint="--episodes") from error

    def _tasks(
        self, specs: Sequence[pb.EnvironmentSpec], *, run_tasks: Mapping[str, str], names: Sequence[str]
    ) -> list[Task]:
        """Return the tasks to play, each with its options. An environment that is named twice is played once.

        run_tasks: see `EvaluatedPolicy.tasks`. A name in `run_tasks` takes precedence over an environment's id.
        """
        task_specs: dict[str, pb.EnvironmentSpec] = {}
        for name in names:
            spec = find_environment(specs, run_tasks.get(name, name), self.version)
            task_specs[name if name in run_tasks else spec.id] = spec
        options = self._options(specs, task_specs)
        limits = Limits(self.turns, self.actions_per_turn, self.actions)
        return [
            Task(
                spec.id,
                self.version,
                parse_options(spec, options[name]),
                limits,
                tuple(spec.action_space.names),
                name if name in run_tasks else "",
            )
            for name, spec in task_specs.items()
        ]

    def _options(
        self, specs: Sequence[pb.EnvironmentSpec], task_specs: Mapping[str, pb.EnvironmentSpec]
    ) -> dict[str, list[str]]:
        """Return the assignments of options for each task. One with a prefix is for that task or environment alone."""
        task_options: dict[str, list[str]] = {name: [] for name in task_specs}
        for assignment in self.assignments:
            prefix, colon, option = assignment.partition(":")
            if not colon or "=" in prefix:
                for options in task_options.values():
                    options.append(assignment)
                continue
            environment = "" if prefix in task_specs else find_environment(specs, prefix).id
            targets = [name for name, spec in task_specs.items() if prefix == name or spec.id == environment]
            if not targets:
                raise click.BadParameter(
                    f"{assignment!r} is for {environment}, which is not played", param_hint="--option"
                )
            for name in targets:
                task_options[name].append(option)
        return task_options


def _own_service(environments: Sequence[EnvironmentConfig]) -> contextlib.AbstractContextManager[str]:
    """Host the environments inside the context, as the run did."""
    return local_services(serve_words(environment.to_dict() for environment in environments))


async def _run(
    fleet: Fleet,
    policy: EvaluatedPolicy,
    choose_tasks: Callable[[Sequence[pb.EnvironmentSpec]], list[Task]],
    seeds: range,
    samples: int,
) -> list[tuple[Task, list[Episode]]]:
    """Play the environments one after the other, and return the episodes of each."""
    console = safe_console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    results = []
    try:
        async with fleet:
            tasks = [policy.agents.fit(task) for task in choose_tasks(await fleet.describe())]
            if set(policy.tasks.values()) & {task.environment for task in tasks}:
                _warn_of_used_seeds(policy.seeds, seeds)
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                for task in tasks:
                    bar = progress.add_task(task.name or task.environment, total=len(seeds) * samples)

                    def advance(_: Episode, bar: TaskID = bar) -> None:
                        progress.advance(bar)

                    collector = Collector(fleet=fleet, agents=policy.agents, task=task, watch=advance)
                    collection = await collector.collect(starts_from(seeds), samples, min_size=0)
                    results.append((task, [episode for group in collection.groups for episode in group.members]))
    finally:
        await policy.agents.close()
    return results


def _warn_of_used_seeds(seeds: SeedsConfig, played_seeds: range) -> None:
    training_warning = "it may have been trained on these start states"
    for name, span, meaning in (
        ("train", seeds.train, training_warning),
        ("warmstart", seeds.warmstart, training_warning),
        ("selection", seeds.selection, "its best checkpoint was chosen on these start states"),
    ):
        if played_seeds.start < span.stop and span.start < played_seeds.stop:
            click.echo(
                f"Warning: seeds {played_seeds.start} to {played_seeds.stop - 1} reach into the run's seeds.{name} "
                f"({span.start} to {span.stop - 1}): {meaning}; without --seed they are held out",
                err=True,
            )
