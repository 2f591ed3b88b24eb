"""`starpod eval`: evaluation of a policy on held-out start states."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from starpod.client import BadArgument, Fleet, Limits, StarpodError, UnknownVersion, Unreachable
from starpod.client.programs import ServiceFailed
from starpod.client.spelling import near
from starpod.client.transport import Transport
from starpod.remote.catalog import (
    JSON,
    WORD,
    access_options,
    expect_writable,
    find_environment,
    parse_options,
    serving,
    write_report,
)
from starpod.report.console import safe_console
from starpod.trainer.agents.base import AgentRefused, Agents, Sampling, Task
from starpod.trainer.agents.scripted import ReferenceAgents, reference_names
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import write_episodes
from starpod.trainer.evaluation.compare import NotComparable, compare_evaluations, read_evaluation
from starpod.trainer.evaluation.figures import episode_results, renumber_groups, summarise
from starpod.trainer.rollout.collect import Collector, starts_from
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import is_hostable, local_services, serve_words
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord

CHAT = "openai:"


@dataclass(frozen=True, slots=True)
class EvaluatedPolicy:
    """A policy to evaluate."""

    kind: str
    name: str
    agents: Agents
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Environment ids by name in the policy's run ("" for the only one); empty without a run."""
    served: Sequence[EnvironmentConfig] = ()
    """Configurations of the run's environments if the run hosts its own servers, else empty."""
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    """Seeds of the run, or the default ones."""


@click.command(name="eval")
@click.argument("model", metavar="MODEL_OR_CHECKPOINT", required=False)
@click.argument("word", metavar="[ENVIRONMENT]", type=WORD, required=False)
@click.option(
    "--environment", "-e", "environments", multiple=True, help="Environment to play. Repeatable. Default: the run's."
)
@click.option("--episodes", type=click.IntRange(1), default=256, show_default=True, help="Start states, one seed each.")
@click.option(
    "--samples", type=click.IntRange(1), default=1, show_default=True, help="Episodes per start state, for pass@k."
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="First seed; the others follow. Default: held out.")
@click.option(
    "--option",
    "assignments",
    multiple=True,
    metavar="[ENV:]KEY=VALUE",
    help="An option of one environment or of all, as JSON; strings may omit their quotes. Repeatable.",
)
@click.option("--version", default="", metavar="RANGE", help="Environment version, such as '>=1,<2'.")
@click.option("--turns", type=click.IntRange(1), help="Maximum turns of an episode. Default: the environment's.")
@click.option("--actions-per-turn", type=click.IntRange(1), help="Maximum actions of a turn.")
@click.option("--actions", type=click.IntRange(1), help="Maximum actions of an episode.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Sampling temperature; 0 is greedy. Default: as in training, else the model's.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Maximum tokens of a reply. Default: as in training, else 400."
)
@click.option("--thinking/--no-thinking", default=None, help="Whether replies begin with reasoning.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="Engine that samples replies.",
)
@click.option("--base-url", help="OpenAI-compatible endpoint, for openai:MODEL. Its key is read from OPENAI_API_KEY.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=16, show_default=True, help="Requests to the endpoint at a time."
)
@click.option(
    "--compare",
    "compared",
    type=click.Path(path_type=Path),
    nargs=2,
    metavar="A B",
    help="Compare two evaluations, episode by episode: reports of --json, or folders of runs. Nothing is played.",
)
@JSON
@click.option("--jsonl", "episodes_file", metavar="FILE", default="", help="Write the episodes (.jsonl or .jsonl.gz).")
@access_options
@click.pass_context
def evaluate(
    context: click.Context,
    model: str | None,
    word: EnvironmentWord | None,
    environments: tuple[str, ...],
    episodes: int,
    samples: int,
    seed: int | None,
    assignments: tuple[str, ...],
    version: str,
    turns: int | None,
    actions_per_turn: int | None,
    actions: int | None,
    temperature: float | None,
    max_tokens: int | None,
    thinking: bool | None,
    engine: Literal["torch", "vllm"],
    base_url: str | None,
    concurrency: int,
    compared: tuple[Path, Path] | None,
    json_file: str,
    episodes_file: str,
    access: Transport,
) -> None:
    """Play MODEL_OR_CHECKPOINT in ENVIRONMENT and report its success.

    ENVIRONMENT is ADDRESS/NAME, or ADDRESS with --environment (host:port, several with commas), or NAME, FILE.py,
    FILE.py:CLASS or FAMILY:NAME, which are served meanwhile. Without it, the environments of a run are served
    meanwhile, if the run served them itself.

    MODEL_OR_CHECKPOINT is the folder of a run, of a checkpoint or of `starpod export`, which are played as in training,
    another Hugging Face model (a folder or a name), an OpenAI-compatible endpoint's model (openai:MODEL), or a policy
    without a model: random, expert, walk or careful (frozen_lake with the local observation), or rule (webshop). These
    play one action per turn.

    Exit status: 0 done, 1 something failed, such as an episode, 2 usage error.
    """
    expect_writable(json_file, episodes_file)
    if compared:
        _compare(*compared, json_file=json_file)
        return
    if not model or not (Path(model).is_dir() or word):
        raise _incomplete_call(model)
    if episodes_file and not episodes_file.endswith((".jsonl", ".jsonl.gz")):
        raise click.BadParameter(f"{episodes_file!r} does not end in .jsonl or .jsonl.gz", param_hint="--jsonl")
    sampling = Sampling(temperature, max_tokens, thinking)
    policy = _policy(model, sampling, engine, base_url, concurrency)
    names: Sequence[str] = environments or [name or id for name, id in policy.tasks.items()]
    if word and word.id and not environments:
        names = [word.id]
    if not (word or (names and policy.served)):
        raise _incomplete_call(model)
    seeds = _seeds(policy.seeds, seed, episodes)
    limits = Limits(turns, actions_per_turn, actions)
    choose_tasks = partial(
        _tasks, run_tasks=policy.tasks, names=names or [""], assignments=assignments, version=version, limits=limits
    )
    start_time = perf_counter()
    try:
        with serving(word) if word else _own_service(policy.served) as address:
            try:
                fleet = Fleet(address, token=access.token, tls=access.tls)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="ADDRESS") from error
            task_results = asyncio.run(_run(fleet, policy, choose_tasks, seeds, samples))
    except (ConfigError, ServiceFailed) as error:
        raise click.ClickException(str(error)) from error
    except Unreachable as error:
        raise click.ClickException(
            f"no server answers at {word and word.addresses} ({error}); start one with: starpod serve"
        ) from error
    except (BadArgument, UnknownVersion) as error:
        raise click.UsageError(str(error)) from error
    except (StarpodError, AgentRefused, UserCodeError) as error:
        raise click.ClickException(str(error)) from error
    report = {
        "policy": {"kind": policy.kind, "name": policy.name, **policy.agents.facts()},
        "address": address,
        "seeds": [seeds.start, seeds.stop],
        "samples": samples,
        "seconds": round(perf_counter() - start_time, 3),
        "environments": {
            task.name or task.environment: {
                "environment": task.environment,
                "version": results[0].version,
                "options": task.options,
                "limits": dataclasses.asdict(task.limits),
                **summarise(results),
                "results": episode_results(results),
            }
            for task, results in task_results
        },
    }
    if episodes_file:
        write_episodes(episodes_file, renumber_groups([results for _, results in task_results]))
    console = safe_console(stderr=json_file == "-", highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # avoid wrapping in a log
    _show(console, report)
    write_report(json_file, json.dumps(report, ensure_ascii=False) + "\n")
    failures = [episode.error for _, results in task_results for episode in results if episode.failed]
    if failures:
        raise click.ClickException(f"{len(failures)} episodes failed, the first one with: {failures[0]}")
    context.exit(0)


def _own_service(environments: Sequence[EnvironmentConfig]) -> contextlib.AbstractContextManager[str]:
    """Host the environments inside the context, as the run did."""
    return local_services(serve_words(environment.to_dict() for environment in environments))


def _incomplete_call(model: str | None) -> click.UsageError:
    """Return the error for a call that lacks a model or an environment. The error shows a full command."""
    other_models = f"{CHAT}MODEL or {', '.join(reference_names())}"
    if not model:
        choices = f"the folder of a run, a checkpoint or an export, a Hugging Face model, {other_models}"
        return click.UsageError(f"name what to evaluate: {choices}; for example: starpod eval runs/lake")
    _refuse_misspelt(model)
    subject, run = f"to play {model}", ""
    if not (Path(model).is_dir() or model in reference_names() or model.startswith(CHAT)):
        subject = f"{model} is no folder here, and not {other_models}. If it is a Hugging Face model"
        run = ". A run is evaluated by its folder: starpod eval runs/lake"
    return click.UsageError(f"{subject}, name an environment, for example: starpod eval {model} frozen_lake{run}")


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


def _policy(
    model: str, sampling: Sampling, engine: Literal["torch", "vllm"], base_url: str | None, concurrency: int
) -> EvaluatedPolicy:
    """Return the policy that a command-line argument names."""
    if model.startswith(CHAT):
        return _chat_policy(model.removeprefix(CHAT), sampling, base_url, concurrency)
    if base_url:
        raise click.UsageError(f"--base-url is for models of an endpoint: openai:{model}")
    if model in reference_names():
        return EvaluatedPolicy("reference", model, ReferenceAgents(model))
    _refuse_misspelt(model)
    return _pretrained_policy(model, sampling, engine)


def _refuse_misspelt(model: str) -> None:
    """Raise BadParameter if `model` looks like a misspelt reference policy or `openai:` prefix."""
    if "/" in model or model in reference_names() or Path(model).exists():
        return
    if close := near(model, [CHAT] if ":" in model else reference_names()):
        raise click.BadParameter(
            f"no policy {model!r}; did you mean {' or '.join(close)}?", param_hint="MODEL_OR_CHECKPOINT"
        )


def _pretrained_policy(model: str, sampling: Sampling, engine: Literal["torch", "vllm"]) -> EvaluatedPolicy:
    from starpod.trainer.agents.pretrained import PretrainedAgents  # slow: imports torch

    try:
        agents = PretrainedAgents(model, sampling, engine)
    except AgentRefused as error:
        raise click.ClickException(str(error)) from error
    if (config := agents.config) is None:
        return EvaluatedPolicy("model", model, agents)
    tasks = {task.name: task.environment.id for task in config.tasks}
    environments = [task.environment for task in config.tasks]
    served = environments if all(map(is_hostable, environments)) else []
    return EvaluatedPolicy("model", model, agents, tasks=tasks, served=served, seeds=config.seeds)


def _chat_policy(model: str, sampling: Sampling, base_url: str | None, concurrency: int) -> EvaluatedPolicy:
    from starpod.trainer.agents.chat import ChatAgents  # slow: imports openai

    if not model:
        raise click.BadParameter(
            "openai: needs a model behind it, as in openai:gpt-5", param_hint="MODEL_OR_CHECKPOINT"
        )
    try:
        agents = ChatAgents(
            model,
            base_url=base_url,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens or 400,
            at_once=concurrency,
            thinking=sampling.thinking is not False,
        )
    except AgentRefused as error:
        raise click.UsageError(str(error)) from error
    return EvaluatedPolicy("openai", model, agents)


def _seeds(seeds: SeedsConfig, first: int | None, count: int) -> range:
    """Return `count` seeds from `first` on. If it is None, use the seeds of a run's final evaluation."""
    if first is not None:
        return range(first, first + count)
    try:
        return seeds.held_out("final", count)
    except ValueError as error:
        raise click.BadParameter(f"{error}; give --seed to play others", param_hint="--episodes") from error


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


def _tasks(
    specs: Sequence[pb.EnvironmentSpec],
    *,
    run_tasks: Mapping[str, str],
    names: Sequence[str],
    assignments: Sequence[str],
    version: str,
    limits: Limits,
) -> list[Task]:
    """Return the tasks to play, each with its options. An environment that is named twice is played once.

    run_tasks: see `EvaluatedPolicy.tasks`. A name in `run_tasks` takes precedence over an environment's id.
    """
    task_specs: dict[str, pb.EnvironmentSpec] = {}
    for name in names:
        spec = find_environment(specs, run_tasks.get(name, name))
        task_specs[name if name in run_tasks else spec.id] = spec
    task_options: dict[str, list[str]] = {name: [] for name in task_specs}
    for assignment in assignments:
        prefix, colon, option = assignment.partition(":")
        if not colon or "=" in prefix:
            for options in task_options.values():
                options.append(assignment)
            continue
        environment = "" if prefix in task_specs else find_environment(specs, prefix).id
        targets = [name for name, spec in task_specs.items() if prefix == name or spec.id == environment]
        if not targets:
            raise click.BadParameter(f"{assignment!r} is for {environment}, which is not played", param_hint="--option")
        for name in targets:
            task_options[name].append(option)
    return [
        Task(
            spec.id,
            version,
            parse_options(spec, task_options[name]),
            limits,
            tuple(spec.action_space.names),
            name if name in run_tasks else "",
        )
        for name, spec in task_specs.items()
    ]


def _show(console: Console, report: dict[str, Any]) -> None:
    policy, environments = report["policy"], report["environments"]
    model = f" ({policy['model']})" if "model" in policy else ""
    title = f"{policy['name']}{model} on seeds {report['seeds'][0]} to {report['seeds'][1] - 1}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    tries = sorted({k for figures in environments.values() for k in figures["pass_at_k"] if k != "1"}, key=int)
    table.add_column("Environment", no_wrap=True)
    for heading in ("Episodes", "Success (95 %)", "Return", "Turns", "Format", *(f"pass@{k}" for k in tries)):
        table.add_column(heading, justify="right", no_wrap=heading.startswith("Success"))
    for name, figures in environments.items():
        success = _share(figures["success"])
        if figures["success"] is not None:
            success += f" ({_share(figures['success_low'])} to {_share(figures['success_high'])})"
        table.add_row(
            name,
            str(figures["episodes"]) + (f" ({figures['failed']} failed)" if figures["failed"] else ""),
            success,
            "-" if figures["return_mean"] is None else f"{figures['return_mean']:.3f}",
            "-" if figures["turns_mean"] is None else f"{figures['turns_mean']:.1f}",
            _share(figures["format_rate"]),
            *(_share(figures["pass_at_k"].get(k)) for k in tries),
        )
    console.print(table)


def _compare(first: Path, second: Path, *, json_file: str) -> None:
    """Print a comparison of two evaluations."""
    try:
        figures = compare_evaluations(read_evaluation(first), read_evaluation(second))
    except NotComparable as error:
        raise click.UsageError(str(error)) from error
    console = safe_console(stderr=json_file == "-", highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    table = Table(title=f"A: {first}, B: {second}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Environment", no_wrap=True)
    for heading in ("Pairs", "Success A", "B", "B - A (95 %)", "p (McNemar)", "Return B - A (95 %)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, comparison in figures.items():
        table.add_row(
            name,
            str(comparison["pairs"]),
            *map(_share, comparison["success"]),
            _difference(comparison["success_difference"], "+.1%"),
            "-" if comparison["p_value"] is None else f"{comparison['p_value']:.2g}",
            _difference(comparison["return_difference"], "+.3f"),
        )
    console.print(table)
    write_report(json_file, json.dumps({"first": str(first), "second": str(second), "environments": figures}) + "\n")


def _difference(values: Sequence[float] | None, form: str) -> str:
    """Return a difference with its interval, such as `+4.1 % (-0.3 % to +8.5 %)`."""
    if values is None:
        return "-"
    difference, low, high = (format(value, form) for value in values)
    return f"{difference} ({low} to {high})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
