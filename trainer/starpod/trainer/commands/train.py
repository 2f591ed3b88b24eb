"""`starpod train`: the command line."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

if TYPE_CHECKING:
    from starpod.trainer.configuration.config import Config
    from starpod.trainer.configuration.loading import Complete
    from starpod.trainer.output.screen import Screen
    from starpod.trainer.run.progress import StopReason
    from starpod.trainer.run.run import Run


_START = Path.cwd()
"""Working folder of the command. A user's function may change that of the process."""


@click.command(epilog="Example: starpod train frozen_lake collect.groups=16 --run-dir runs/lake --ui")
@click.argument("config", required=False)
@click.argument("words", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="runs/CONFIG-TIME",
    help="Folder of the run. A new one is created.",
)
@click.option("--resume", is_flag=True, help="Continue the run in the folder of --run-dir from its last checkpoint.")
@click.option(
    "--resume-or-start",
    is_flag=True,
    help="Continue the run in the folder of --run-dir, or start it if the folder is empty. For schedulers.",
)
@click.option(
    "--change",
    "changes",
    metavar="KEY",
    multiple=True,
    help="Key, such as environment.id, that may differ from the run's when it is continued. Repeatable.",
)
@click.option(
    "--imitate",
    metavar="FILE",
    help="Imitate episodes of a run, conversations in OpenAI's chat format or ATIF trajectories before reinforcement "
    "learning, in place of demonstrations that the run plays. Sets warm_start.demonstrations, episodes=0, steps=null.",
)
@click.option(
    "--ui",
    "with_site",
    is_flag=True,
    help="Also serve a page that shows the run in a browser. On a terminal, it stays after the run until Ctrl-C.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check the configuration, print all its values, where each comes from and the memory it needs, and stop. "
    "Options of the environment are not checked, because no server is started.",
)
@click.option(
    "--list",
    "list_configurations",
    is_flag=True,
    help="List the jobs that come with the package, with the minutes that each takes on two cores.",
)
@click.option(
    "--keys",
    metavar="[SECTION]",
    is_flag=False,
    flag_value="",
    help="Explain all keys of a configuration, or those of a section, such as algorithm.filter.",
)
def train(
    config: str | None,
    words: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    resume_or_start: bool,
    changes: tuple[str, ...],
    imitate: str | None,
    with_site: bool,
    dry_run: bool,
    list_configurations: bool,
    keys: str | None,
) -> int:
    """Train a language model to act in an environment.

    CONFIG is a YAML file, or the name of a configuration that comes with the package (--list prints them). It may also
    be an environment, for which settings are chosen: FILE.py, FILE.py:CLASS, a file of questions such as tasks.jsonl,
    the NAME of an installed one, FAMILY:NAME of another package, or HOST:PORT/NAME at a server in any language. By
    default, CONFIG is frozen_lake, and with --resume the run's own configuration.

    KEY=VALUE sets a key, such as algorithm=starpo-grpo or collect.groups=16 (--keys explains all). On Ctrl-C or
    SIGTERM, the run saves its state and exits.
    """
    from starpod.trainer.commands.jobs import list_jobs
    from starpod.trainer.configuration.section import ConfigError

    if list_configurations or keys is not None:
        click.echo(list_jobs() if keys is None else _explain_keys(keys), nl=False)
        return 0
    config, words = _separate_words(config, words)
    if imitate is not None:
        from starpod.trainer.warm_start.config import imitation_words

        words = (*words, *imitation_words(imitate, words))
    from starpod.trainer.configuration.advice import advise
    from starpod.trainer.configuration.environment_file import Job, choose_job
    from starpod.trainer.configuration.preflight import check
    from starpod.trainer.configuration.resolve import USUAL, resolve_run

    def explore(environment: str, complete: Complete) -> Mapping[str, Any]:
        jobs.append(choose_job(environment, complete, lambda line: click.echo(line, err=True)))
        return jobs[-1].values

    jobs: list[Job] = []
    # Absolute from here on, because a user's function may change the working folder.
    name = re.sub(r"[^\w.-]+", "-", Path(config or USUAL).stem) + time.strftime("-%Y%m%d-%H%M%S")
    path = (run_dir or Path("runs") / name).absolute()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun sets both variables. A user who only wants an estimate by --dry-run sets WORLD_SIZE.
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    try:
        run = resolve_run(
            config, words, run_dir, resume=resume, resume_or_start=resume_or_start, changes=changes, explore=explore
        )
        check(run.config, world=world, local_world=local_world, resume=run.resume)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    for job in jobs:
        click.echo("\n".join(job.explain(run.config)), err=True)
    for line in advise(run.config) if os.environ.get("RANK", "0") == "0" else ():
        click.echo(f"warning: {line}", err=True)
    if dry_run:
        from starpod.trainer.commands.keys import annotate

        click.echo("\n".join(annotate(run.config.to_dict(), run.origins)))
        return _check_memory(run.config)
    if run_dir is None and world > 1:
        raise click.UsageError("each process of torchrun would create its own folder: name one with --run-dir")
    return run_training(run.config, path, resume=run.resume, with_site=with_site)


def _explain_keys(section: str) -> str:
    from starpod.trainer.commands.keys import explain
    from starpod.trainer.configuration.section import ConfigError

    try:
        return explain(section)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _separate_words(config: str | None, words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return CONFIG, which may be left out, and one KEY=VALUE for each key."""
    from starpod.trainer.configuration.loading import names_environment

    if config is not None and "=" in config and not (os.path.exists(config) or names_environment(config)):
        words, config = (config, *words), None
    names = [word.partition("=")[0] for word in words]
    if repeated_keys := sorted({name for name in names if names.count(name) > 1}):
        # Accept repeated keys: scripts often append the user's arguments to their own.
        click.echo(f"given more than once, the last one counts: {', '.join(repeated_keys)}", err=True)
        words = tuple(dict(zip(names, words, strict=True)).values())
    return config, words


def _check_memory(config: Config) -> int:
    """Check the chat template, and print the estimated memory as comments below the configuration.

    Raises UsageError if the template cannot be used or the run cannot fit.
    """
    import transformers

    from starpod.trainer.configuration.preflight import check_templates
    from starpod.trainer.engines.base import EngineError
    from starpod.trainer.models.config import ModelError
    from starpod.trainer.parallel.ranks import NoDevice
    from starpod.trainer.run.memory import estimate_memory, place_of

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        for line in check_templates(config):
            click.echo(f"warning: {line}", err=True)
        estimate = estimate_memory(config, place_of(config.device))
    except (ModelError, NoDevice) as error:
        click.echo(f"# Memory is not estimated: {error}")
        return 0
    except (EngineError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    click.echo("".join(f"# {line}\n" for line in estimate.table()), nl=False)
    if not estimate.fits:
        raise click.UsageError(estimate.advice())
    return 0


def run_training(config: Config, path: Path, *, resume: bool, with_site: bool = False) -> int:
    """Train, write the report, and return the exit status.

    with_site: run `starpod ui` for the folder meanwhile. Raises UsageError for a configuration that turns out to be
    wrong before the first iteration.
    """
    from starpod.trainer.loop import train as loop
    from starpod.trainer.output.live import make_screen
    from starpod.trainer.output.screen import client_events
    from starpod.trainer.parallel.ranks import Parallel
    from starpod.trainer.run.interrupts import Interrupted, Interrupts
    from starpod.trainer.run.progress import StopReason
    from starpod.trainer.run.setup import open_run

    async def main() -> StopReason:
        run: Run | None = None
        try:
            async with open_run(
                config, path, resume=resume, parallel=parallel, screen=screen, interrupts=interrupts, begin=begin
            ) as run:
                return await loop(run)
        except Interrupted:
            assert interrupts.signal is not None
            return StopReason(f"stopped by {interrupts.signal.name} before the first iteration")
        except Exception as error:
            if (readable_error := _readable_error(error, config, path, run)) is None:
                raise
            raise readable_error from error

    _set_up_libraries(config)
    engine = config.engine
    parallel = Parallel.start(config.device, per_engine=engine.tensor_parallel if engine.name == "vllm" else 1)
    site = ""

    def begin() -> None:
        nonlocal site
        if with_site and parallel.is_main:
            site = stack.enter_context(_live_site(path, "--port", "0", "--of-run", *_access(config)))
        screen.start(config.title or _environments(config), ({"live": site} if site else {}) | make_plan(config, path))

    screen_kind = config.monitor.screen if parallel.is_main else "off"
    with ExitStack() as stack, make_screen(screen_kind) as screen, client_events(screen):
        interrupts = Interrupts(notify=screen.warn, ranks=parallel.world)
        try:
            with interrupts:
                reason = interrupts.run(main())
        except KeyboardInterrupt:
            screen.close()
            parallel.end(interrupts.status)  # a process that must stop at once waits for nothing
            raise
        finally:
            parallel.close()
        if parallel.is_main:
            screen.done(_write_ending(path, config, reason, screen))
    if site and parallel.world == 1 and not interrupts.requested and sys.stdin.isatty() and sys.stderr.isatty():
        _show_on(path, config, site)
    parallel.end(interrupts.status)
    return interrupts.status


def _set_up_libraries(config: Config) -> None:
    """Set the number of torch's threads, and let transformers report errors alone."""
    import torch
    import transformers

    torch.set_num_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _readable_error(error: Exception, config: Config, path: Path, run: Run | None) -> click.ClickException | None:
    """Return the error to show for what ended a run; None if a user needs its traceback."""
    from starpod.client import Unreachable
    from starpod.trainer.checkpoints.folders import list_checkpoints
    from starpod.trainer.configuration.user_file import UserCodeError
    from starpod.trainer.output.files import CannotWrite
    from starpod.trainer.output.run_folder import RunFolder
    from starpod.trainer.parallel.ranks import INPUT_ERRORS, RankRefused

    if isinstance(error, Unreachable):
        condition = "once it answers, " * any(task.environment.addresses for task in config.tasks)
        return click.ClickException(f"{_unreachable(config, error)}; {condition}{_next(path, config)}")
    if isinstance(error, (*INPUT_ERRORS, RankRefused)) and (run is None or not run.progress.step):
        return click.UsageError(str(error))
    message, folder = str(error) or type(error).__name__, RunFolder(path)
    if not (isinstance(error, UserCodeError | CannotWrite) or (run is not None and folder.exists)):
        return None
    if saved := list_checkpoints(folder.checkpoints):
        message += f"; the run is saved as of step {saved[0].step}"
    return click.ClickException(f"{message}; {_next(path, config)}")


def _write_ending(path: Path, config: Config, reason: StopReason, screen: Screen) -> dict[str, str]:
    """Write the report of a run that is over or stopped. Return the last lines of the screen by heading."""
    from starpod.trainer.configuration.environment_file import remedies
    from starpod.trainer.diagnostics.success import has_risen
    from starpod.trainer.output.report import write_report
    from starpod.trainer.output.run_folder import RunFolder
    from starpod.trainer.output.words import evaluation_after_best, figure_of, final_line, outcome

    screen.phase("writing the report")
    try:
        report = write_report(path)
    except FileNotFoundError:  # stopped before there was anything to report
        return {"outcome": reason.text, "next": _next(path, config)}
    folder = RunFolder(path)
    best_step, final_result, evaluations = folder.best_step, folder.read_final(), folder.read_evaluations()
    lines = {"outcome": reason.text}
    lines |= {} if final_result is None else {"final": final_line(final_result)}
    if last_result := evaluation_after_best(final_result, evaluations):
        lines["last"] = f"{outcome(last_result)} at step {last_result['step']}, on the selection seeds"
    lines |= {} if best_step is None else {"best": f"the checkpoint of step {best_step}"}
    if not has_risen(evaluations):
        lines[f"{figure_of(evaluations)[0]} did not rise"] = (
            "train longer, " * bool(reason.limits) + remedies(config.warm_start) + "; monitor.gradients.every=1 shows "
            "whether collections are too small (docs/training.md#when-success-does-not-rise)"
        )
    command_lines = commands(_shown(path), config.to_dict(), [*reason.limits])
    return {**lines, "report": str(_shown(report)), **command_lines}


@contextmanager
def _live_site(path: Path, *words: str) -> Iterator[str]:
    """Run a live site for the run during the context, and yield its address. Raises ClickException."""
    from starpod.client.programs import ServiceFailed, run_program

    try:
        # The folder is created later, and only if the run begins.
        with run_program("the live site", "ui", str(path), "--index", ":memory:", *words) as address:
            yield address
    except ServiceFailed as error:
        raise click.ClickException(str(error)) from error


def _access(config: Config) -> list[str]:
    """Return the access options of the run's servers for the live site; empty if the servers need different ones."""
    names = ("token_file", "ca", "certificate", "key")
    option_sets = {tuple(getattr(task.environment, name) for name in names) for task in config.tasks}
    options = zip(names, option_sets.pop(), strict=True) if len(option_sets) == 1 else ()
    return [word for name, value in options if value for word in (f"--{name.replace('_', '-')}", value)]


def _show_on(path: Path, config: Config, site: str) -> None:
    """Show the finished run at the address `site` until Ctrl-C. The site restarts servers that the run hosted."""
    words = shlex.split(commands(path, config.to_dict())["look"])[3:]
    if "SERVER" in words:  # a placeholder that only the user can fill in
        words = []
    port = str(urlsplit(site).port)
    try:
        with suppress(KeyboardInterrupt), _live_site(path, "--port", port, *words, *_access(config)) as address:
            click.echo(f"the pages stay at {address} until Ctrl-C", err=True)
            while True:
                time.sleep(60)
    except click.ClickException as error:  # the run itself is done
        click.echo(error.message, err=True)


def _unreachable(config: Config, error: Exception) -> str:
    """Return what is wrong with the servers, without a full stop. If no server listens, gRPC's message is replaced."""
    from starpod.remote.catalog import no_answer

    details = str(error).removesuffix(".")
    addresses = [address for task in config.tasks for address in task.environment.addresses]
    return no_answer(", ".join(addresses), details) if addresses and "failed to connect" in details else details


def _shown(path: Path) -> Path:
    """Return a path as a user in the folder where the command was started can type it."""
    return path.relative_to(_START) if path.is_relative_to(_START) else path


def _next(path: Path, config: Config) -> str:
    """Return advice on how to continue."""
    from starpod.trainer.output.run_folder import RunFolder

    if RunFolder(path).exists:
        return f"continue with: {commands(_shown(path), config.to_dict())['go on']}"
    return "give the same command again: nothing was trained yet"


def raised_limits(stop: Mapping[str, Any], limits: object) -> str:
    """Return the command-line words that let a run continue beyond the limits that ended it: they double each.

    Without these words, `--resume` would only evaluate the run again and stop.

    Args:
        limits: `ended.limits` of its run.json.
    """
    values = {name: stop.get(name) for name in limits if isinstance(name, str)} if isinstance(limits, list) else {}
    words = [
        f" stop.{name}={'null' if name == 'success' else format(2 * value or 1, '.15g')}"
        for name, value in values.items()
        if isinstance(value, int | float)
    ]
    return "".join(words)


def commands(path: Path, config: Mapping[str, Any], limits: object = ()) -> dict[str, str]:
    """Return command lines to type next for the run in a folder, by purpose, such as "go on" and "evaluate".

    Args:
        config: Content of its config.yaml.
        limits: See `raised_limits`.
    """
    from starpod.trainer.rollout.environment import server_words

    folder, stop = shlex.quote(str(path)), config.get("stop")
    stop = stop if isinstance(stop, Mapping) else {}
    environments = config.get("environments") or {"": config.get("environment") or {}}
    tasks = [task for task in environments.values() if isinstance(task, Mapping) and task.get("id")]
    addresses = dict.fromkeys(str(address) for task in tasks for address in task.get("addresses") or ())
    address_text = shlex.quote(",".join(addresses)) if addresses else ""
    servers = dict.fromkeys(server_words(str(task["id"]), task.get("serve") or []) for task in tasks)
    return {
        "go on": f"starpod train --resume --run-dir {folder}{raised_limits(stop, limits)}",
        "look": f"starpod ui {folder} {f'--address {address_text}' if address_text else ' '.join(servers)}",
        "evaluate": f"starpod eval {folder}",
        "watch": f"starpod watch {folder}",
        "export": f"starpod export {folder} {shlex.quote(f'{path}-model')}",
    }


def _environments(config: Config) -> str:
    return ", ".join(task.name or task.environment.id for task in config.tasks)


def make_plan(config: Config, path: Path) -> dict[str, object]:
    """Return the main settings, for the screen."""
    from starpod.trainer.models.config import model_title

    collect, stop = config.collect, config.stop
    plan: dict[str, object] = {
        "environment": _environments(config),
        "model": model_title(config.model.name),
        "engine": config.engine.name,
        "algorithm": config.algorithm.preset,
        "episodes": f"{collect.groups} groups x {collect.group_size} in each of {stop.iterations} iterations",
        "folder": str(_shown(path)),
    }
    if stop.minutes is not None:
        plan["budget_seconds"] = 60 * stop.minutes
    return plan
