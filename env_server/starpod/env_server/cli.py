"""The command `starpod serve`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import uvloop

from starpod.env_server.hosting.families import NothingFits, add_hosted
from starpod.env_server.operation.config import ServerConfig
from starpod.env_server.operation.tracing import TracingUnavailable
from starpod.env_server.processes.threads import THREAD_NAME
from starpod.env_server.registry import Registry, RegistryError
from starpod.env_server.server import memory
from starpod.env_server.server.listening import ServerError
from starpod.env_server.server.logs import configure_logs
from starpod.env_server.server.options import HEADINGS, OPTIONS, read_options
from starpod.env_server.server.server import EnvironmentServer
from starpod.env_server.server.supervisor import supervise
from starpod.env_server.sessions.seal import SealKeyError
from starpod.env_server.transports.auth import TokenFileError
from starpod.serving.options import Command
from starpod.serving.sockets import claim_output, end_process_with_stdin
from starpod.v1.environment_word import EnvironmentWord, WordError

logger = logging.getLogger(__name__)

_LAST_SECONDS = 1.0
"""Maximum seconds to wait at exit for threads to finish. Their sessions have already ended."""

_SUPERVISED = ("host", "port", "metrics_port", "health_port", "drain_seconds")


class ServeCommand(Command):
    """The command, in which the folder of an exported model means the environments that it was trained on.

    Scripts that write `--environment-module FILE.py` for the argument FILE.py still work.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [word.removeprefix("--environment-module=") for word in args if word != "--environment-module"]
        return super().parse_args(ctx, [word for argument in args for word in _expanded(argument)])


def _expanded(argument: str) -> list[str]:
    """Return the words that the folder of a model exported by the trainer means, or the argument itself."""
    file = Path(argument) / "starpod.json"
    if not file.is_file():
        return [argument]
    try:
        return [str(word) for word in json.loads(file.read_text(encoding="utf-8"))["serve"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise click.UsageError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


@click.command(
    cls=ServeCommand,
    headings=HEADINGS,
    epilog="Example: starpod serve frozen_lake mine.py --port 50051 --workers 2",
    params=[click.Argument(["environments"], nargs=-1, metavar="[ENVIRONMENT]..."), *OPTIONS],
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    show_default="only this process",
    help="Number of server processes, on consecutive ports. One that dies is restarted.",
)
@click.option(
    "--end-with-stdin",
    is_flag=True,
    help="End at once, without a drain, when standard input closes, for example because the parent process ended.",
)
@click.option(
    "--log-format",
    default="text",
    type=click.Choice(["text", "json"]),
    help="Format of the log. json: one object per line.",
)
@click.option(
    "--log-level",
    default="warning",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="Lowest level of log lines, which go to standard error.",
)
def serve(
    environments: tuple[str, ...],
    workers: int | None,
    end_with_stdin: bool,
    log_format: Literal["text", "json"],
    log_level: str,
    **values: Any,
) -> None:
    """Serve environments over gRPC until SIGTERM or Ctrl-C.

    ENVIRONMENT is the NAME of an installed one, FILE.py, FILE.py:CLASS, the ./FOLDER of a package, a file of questions
    such as tasks.jsonl, or FAMILY:NAME for one of another package, such as gymnasium:CartPole-v1. Without ENVIRONMENT,
    all installed ones are served; * adds all of them to others. A name may omit its version: `sokoban` is `sokoban-v1`.
    For the folder of an exported model, the environments that it was trained on are served. Prints one line with the
    address when ready.

    A time is written as 30s, 5m or 500ms, and a size as 16MiB; a number alone is in seconds or bytes.
    """
    settings = read_options(values)
    stores, http = settings.pop("stores"), settings["http"]
    configure_logs(log_format, log_level)
    if end_with_stdin:
        end_process_with_stdin()
    if workers is not None:
        supervised = {name: settings[name] for name in _SUPERVISED}
        sys.exit(supervise(sys.argv[1:], workers, http_port=http and http.port, **supervised))
    output = claim_output()
    try:
        registry = _registry(environments, stores)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(registry, ServerConfig(**settings), output))
    except (RegistryError, WordError) as error:
        raise click.UsageError(str(error)) from error
    except (ServerError, TokenFileError, SealKeyError, TracingUnavailable) as error:
        raise click.ClickException(str(error)) from error
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for another Ctrl-C during the remaining clean-up
    _leave_behind_what_hangs()


def _registry(environments: Sequence[str], stores: Sequence[str]) -> Registry:
    """Prepare and return the environments to host. Raises RegistryError and WordError."""
    words = [EnvironmentWord.parse(text) for text in environments if text != "*"]
    if served := next((word for word in words if word.addresses), None):
        raise WordError(f"{served.text} is served already: name what to serve here")
    selects_all = "*" in environments
    names = [word.id for word in words if word.id]
    registry = Registry.installed(() if selects_all else names) if selects_all or names or not words else Registry()
    added_ids: list[str] = []
    failures: list[NothingFits] = []
    for word in words:
        if word.path:
            added_ids += registry.add_module(str(word.path), word.name)
        elif word.family:
            try:
                added_ids += add_hosted(registry, word.text)
            except NothingFits as error:
                if word.name != "*":
                    raise
                failures.append(error)  # `*` selects all environments that can be hosted, and there are none
    if failures and not registry.ids:
        raise failures[0]
    for failure in failures:
        logger.warning("%s", failure)
    if words and not selects_all:
        registry = registry.select([*names, *added_ids])
        added_ids = registry.ids
    if stores:
        registry.use_stores(stores)
    return registry.prepare(added_ids)


async def _serve(registry: Registry, config: ServerConfig, ready: TextIO) -> None:
    server = EnvironmentServer(registry, config)
    loop = asyncio.get_running_loop()
    terminate, interrupt = asyncio.Event(), asyncio.Event()

    def on_signal(event: asyncio.Event) -> None:
        # A second signal of either kind ends the drain.
        (interrupt if terminate.is_set() else event).set()
        terminate.set()

    loop.add_signal_handler(signal.SIGTERM, on_signal, terminate)
    loop.add_signal_handler(signal.SIGINT, on_signal, interrupt)
    try:
        await server.start()
    except ServerError:
        await server.stop()  # or gRPC prints a traceback about a server that is still running
        raise
    memory.settle()
    over_http = f", as JSON at {server.http_address}," if server.http_address else ""
    print(f"Serving {', '.join(registry.ids)}{over_http} on {server.address}", file=ready, flush=True)
    await terminate.wait()
    if not interrupt.is_set():
        drain = asyncio.create_task(server.drain())
        impatience = asyncio.create_task(interrupt.wait())
        await asyncio.wait({drain, impatience}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, impatience):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await server.stop()


def _leave_behind_what_hangs() -> None:
    """Exit at once if a thread hangs in an environment's code, because Python would wait for it forever."""
    deadline = time.monotonic() + _LAST_SECONDS
    threads = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and (not thread.daemon or thread.name.startswith(THREAD_NAME))
    ]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(0)
