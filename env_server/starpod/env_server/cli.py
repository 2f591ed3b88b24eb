"""`starpod serve`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import uvloop

from starpod.env_server import memory
from starpod.env_server.config import HTTP, TLS, ServerConfig, ServerLimits
from starpod.env_server.limits import Quota
from starpod.env_server.logs import configure_logs
from starpod.env_server.processes.supervisor import supervise
from starpod.env_server.processes.threads import THREAD_NAME
from starpod.env_server.registry import NothingFits, Registry, RegistryError
from starpod.env_server.sandbox.sandbox import MEBIBYTE, MODES, UNTRUSTING, Sandbox
from starpod.env_server.server import EnvironmentServer, ServerError
from starpod.env_server.sessions.requests import OTHER_BYTES
from starpod.env_server.sessions.seal import SealKeyError
from starpod.env_server.tracing import TracingUnavailable
from starpod.env_server.transports.auth import TokenFileError

logger = logging.getLogger(__name__)

_LAST_SECONDS = 1.0
"""How long threads have at the end, when their sessions are gone already."""


_LIMIT_HELP = {
    "max_sessions": "Sessions alive or being made, in one worker. So too the limits below.",
    "max_message_bytes": "One message in either direction.",
    "max_calls_in_flight": "Calls being worked on, also those whose caller gave up.",
    "max_snapshot_bytes": "One snapshot; of class process never more than 64 MiB, which bounds forks too.",
    "max_processes": "Sessions of class process, which have a process each.",
    "max_group": "Sessions made by one Open, Fork or Restore.",
    "max_step_actions": "Sub-actions of one turn.",
    "max_step_bytes": "Their bytes.",
    "max_options_bytes": "The options of one Open or Reset.",
    "max_values": "Values in them, and in the JSON of one turn.",
    "max_connections": "Connections; those beyond are closed.",
    "max_streams": "Streams connected.",
    "default_lease_seconds": "Seconds a session may rest, unless Open asks otherwise.",
    "max_lease_seconds": "The longest lease that Open can ask for.",
    "max_connections_per_address": "From one IPv4 address or IPv6 /64, on Linux. Those beyond are closed within a "
    "second, those without a stream first; 0: no limit but the one of all.",
    "max_health_calls": "Calls of health, reflection and pages of HTTP at once; a quarter of them from one "
    "address, 16 over one connection.",
}
_SUPERVISED = ("host", "port", "metrics_port", "health_port", "drain_seconds")
_LEAST = {"max_message_bytes": 1024, "max_step_bytes": 1024, "max_connections_per_address": 0}


def _limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each field of ServerLimits."""
    for limit in reversed(fields(ServerLimits)):
        name = limit.name
        seconds = name.endswith("_seconds")
        command = click.option(
            "--" + name.removesuffix("_seconds").removeprefix("default_").replace("_", "-"),
            name,
            default=limit.default,
            show_default=True,
            type=click.FloatRange(0, min_open=True) if seconds else click.IntRange(_LEAST.get(name, 1)),
            help=_LIMIT_HELP[name],
        )(command)
    return command


@click.command(short_help="Serve environments.")
@click.argument("environments", nargs=-1, metavar="[ENVIRONMENT]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=50051, show_default=True, type=click.IntRange(0, 65535), help="0: any free port.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Processes, on consecutive ports; one that dies is started again. Default: this process alone.",
)
@click.option(
    "--metrics-port",
    default=0,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics here (worker i on port + i); 0: not at all.",
)
@click.option(
    "--health-port",
    default=0,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Answer grpc.health.v1 here too, without TLS (worker i on port + i), for probes that speak none; 0: not.",
)
@click.option(
    "--http",
    "http_port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Serve the same as JSON over HTTP here (worker i on port + i); 0: any free port.",
)
@click.option(
    "--http-host",
    "http_hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which callers reach HTTP, besides localhost and addresses: other Host headers are refused. "
    "Repeatable.",
)
@click.option("--mcp", is_flag=True, help="Serve MCP, too: at /mcp/ENVIRONMENT/NAME of HTTP's address.")
@click.option(
    "--ors-server",
    is_flag=True,
    help="Serve the Open Reward Standard, too, at HTTP's address: tasks are seeds, turns are calls of tools.",
)
@click.option(
    "--environment-module",
    "modules",
    multiple=True,
    metavar="FILE.py|FOLDER|MODULE",
    help="Also host the environments that this file, package's folder or module defines. Repeatable.",
)
@click.option(
    "--gymnasium",
    multiple=True,
    metavar="ID",
    help="Also host this Gymnasium environment, e.g. FrozenLake-v1?is_slippery=false#concurrency=thread. Repeatable.",
)
@click.option(
    "--openenv",
    multiple=True,
    metavar="MODULE:CLASS",
    help="Also host this OpenEnv environment, e.g. echo_env.server.echo_environment:EchoEnvironment. Repeatable.",
)
@click.option(
    "--skyrl-gym",
    multiple=True,
    metavar="ID",
    help="Also host this SkyRL-gym environment, e.g. gsm8k#rows=questions.jsonl. Repeatable.",
)
@click.option(
    "--reasoning-gym",
    multiple=True,
    metavar="DATASET",
    help="Also host this dataset of Reasoning Gym, e.g. leg_counting?max_animals=5. Repeatable.",
)
@click.option(
    "--textarena",
    multiple=True,
    metavar="ID",
    help="Also host this TextArena game, e.g. Mastermind-v0?code_length=3 or TicTacToe-v0#players=2. Repeatable.",
)
@click.option(
    "--textworld",
    multiple=True,
    metavar="FILE|FOLDER",
    help="Also host these TextWorld games, which tw-make made; the seed picks one. Repeatable.",
)
@click.option(
    "--ors",
    multiple=True,
    metavar="URL",
    help="Also host this environment of an Open Reward Standard server, e.g. http://127.0.0.1:8080/sums. Repeatable.",
)
@click.option(
    "--verifiers",
    multiple=True,
    metavar="TASKSET",
    help="Also host this taskset of verifiers, e.g. gsm8k-v1?num_tasks=100#success_at=1. Repeatable.",
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    metavar="NAME=PATH",
    help="Data for environments that use stores, e.g. a shop that `starpod webshop build` built. Repeatable; the first "
    "is the default.",
)
@_limit_options
@click.option(
    "--drain",
    "drain_seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that live sessions may go on after SIGTERM.",
)
@click.option(
    "--keepalive",
    "keepalive_seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Seconds without traffic after which a client is asked whether it is still there; without an answer for half "
    "as long it is gone.",
)
@click.option(
    "--threads", default=16, show_default=True, type=click.IntRange(1), help="Pool for steps of class thread."
)
@click.option(
    "--thread-timeout",
    "thread_seconds",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds after which a step of class thread or a slow reset counts as hung: its session is lost.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Bearer tokens, one per line, each with its own limits if it is to have some. Read again when it changes.",
)
@click.option(
    "--token-sessions",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Sessions of a token whose line says nothing else; 0: no limit. So too the next two.",
)
@click.option(
    "--token-calls-per-second",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="A group counts as its sessions, each 64 KiB of a request as one call more.",
)
@click.option("--token-streams", default=0, show_default=True, type=click.IntRange(0), help="Streams connected.")
@click.option(
    "--snapshot-key-file",
    type=click.Path(path_type=Path),
    help="Seal snapshots with the first key of this file, one per line; all open them. The same for the whole fleet.",
)
@click.option(
    "--sandbox",
    default=UNTRUSTING.mode,
    show_default=True,
    type=click.Choice(MODES),
    help="Confine processes of class process: in full or do not serve, as far as the system can, or not at all.",
)
@click.option(
    "--sandbox-memory",
    default=UNTRUSTING.memory_bytes // MEBIBYTE,
    show_default=True,
    type=click.IntRange(1),
    help="MiB that such a process may take beyond what it starts with.",
)
@click.option(
    "--sandbox-cpu",
    default=UNTRUSTING.cpu_seconds,
    show_default=True,
    type=click.IntRange(1),
    help="CPU seconds of its whole life.",
)
@click.option(
    "--sandbox-read",
    multiple=True,
    type=click.Path(exists=True, resolve_path=True),
    help="A file or folder that such a process may read besides its own and Python's. Repeatable.",
)
@click.option(
    "--effects",
    type=click.Path(file_okay=False, path_type=Path),
    help="Record in this folder what judges and the like reply to environments, so that no replay asks again. The same "
    "for the whole fleet.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="PEM certificate chain.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM private key.")
@click.option("--tls-client-ca", type=click.Path(path_type=Path), help="Clients must show a certificate of this CA.")
@click.option(
    "--end-with-stdin",
    is_flag=True,
    help="End, as on SIGTERM, when standard input closes: with whoever holds its other end, however that went.",
)
@click.option("--otlp-endpoint", default="", help="Send OpenTelemetry spans to this collector, host:port.")
@click.option(
    "--log-format",
    default="text",
    show_default=True,
    type=click.Choice(["text", "json"]),
    help="json: one object per line.",
)
@click.option(
    "--log-level",
    default="warning",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="The least that is logged, on standard error.",
)
@click.option("--endpoints", default="", hidden=True, help="Set by the supervisor: addresses of all workers.")
@click.option("--http-endpoints", default="", hidden=True, help="Set by the supervisor: their addresses of HTTP.")
def serve(
    environments: tuple[str, ...],
    workers: int | None,
    modules: tuple[str, ...],
    gymnasium: tuple[str, ...],
    openenv: tuple[str, ...],
    skyrl_gym: tuple[str, ...],
    reasoning_gym: tuple[str, ...],
    textarena: tuple[str, ...],
    textworld: tuple[str, ...],
    ors: tuple[str, ...],
    verifiers: tuple[str, ...],
    stores: tuple[str, ...],
    token_sessions: int,
    token_calls_per_second: float,
    token_streams: int,
    sandbox: Literal["require", "best-effort", "off"],
    sandbox_memory: int,
    sandbox_cpu: int,
    sandbox_read: tuple[str, ...],
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    end_with_stdin: bool,
    log_format: str,
    log_level: str,
    endpoints: str,
    http_port: int | None,
    http_hosts: tuple[str, ...],
    http_endpoints: str,
    mcp: bool,
    ors_server: bool,
    **settings: Any,
) -> None:
    """Serves environments over gRPC until SIGTERM or Ctrl-C.

    Without a name: every installed environment; * stands for them beside others. A name may leave out its version:
    `sokoban` is `sokoban-v1`.
    Prints one line with the address when ready.
    """
    if bool(tls_certificate) != bool(tls_key) or (tls_client_ca and not tls_certificate):
        raise click.UsageError("--tls-certificate and --tls-key go together; --tls-client-ca needs both")
    # What is left are fields of ServerLimits and of ServerConfig.
    limits = ServerLimits(**{limit.name: settings.pop(limit.name) for limit in fields(ServerLimits)})
    if limits.max_lease_seconds < limits.default_lease_seconds:
        raise click.UsageError("--lease is longer than --max-lease")
    for name in ("max_snapshot_bytes", "max_step_bytes"):
        size, default = getattr(limits, name), getattr(ServerLimits(), name)
        if size > default and (least := size + OTHER_BYTES) > limits.max_message_bytes:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} {size} does not fit into a message: raise --max-message-bytes to {least}")
    if (http_hosts or mcp or ors_server) and http_port is None:
        raise click.UsageError("--http-host, --mcp and --ors-server need --http PORT")
    if (token_sessions or token_calls_per_second or token_streams) and not settings["token_file"]:
        raise click.UsageError("--token-sessions, --token-calls-per-second and --token-streams need --token-file")
    configure_logs("json" if log_format == "json" else "text", log_level)
    if end_with_stdin:
        _end_with_stdin()
    if workers is not None:
        supervised = {name: settings[name] for name in _SUPERVISED}
        sys.exit(supervise(sys.argv[1:], workers, http_port=http_port, **supervised))
    ready = _claim_output()
    try:
        hosted = {
            "gymnasium": gymnasium,
            "openenv": openenv,
            "skyrl_gym": skyrl_gym,
            "reasoning_gym": reasoning_gym,
            "textarena": textarena,
            "textworld": textworld,
            "ors": ors,
            "verifiers": verifiers,
        }
        registry, asked = _registry(environments, modules, hosted)
        if stores:
            registry.use_stores(stores)
        registry = registry.prepare(asked)
        http = HTTP(http_port or 0, _addresses(http_endpoints), http_hosts, mcp, ors_server)
        config = ServerConfig(
            limits=limits,
            endpoints=_addresses(endpoints),
            http=None if http_port is None else http,
            sandbox=Sandbox(sandbox, sandbox_memory * MEBIBYTE, sandbox_cpu, readable=sandbox_read),
            quota=Quota(token_sessions, token_calls_per_second, token_streams),
            tls=TLS(tls_certificate, tls_key, tls_client_ca) if tls_certificate and tls_key else None,
            **settings,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(registry, config, ready))
    except RegistryError as error:
        raise click.UsageError(str(error)) from error
    except (ServerError, TokenFileError, SealKeyError, TracingUnavailable) as error:
        raise click.ClickException(str(error)) from error
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more Ctrl-C is no exception in what is left to do
    _leave_behind_what_hangs()


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _claim_output() -> TextIO:
    """Standard output, for the ready line alone: what anything else prints from now on goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _registry(
    environments: tuple[str, ...], modules: tuple[str, ...], hosted: Mapping[str, tuple[str, ...]]
) -> tuple[Registry, list[str]]:
    """What to host, and the ids among it that were asked for."""
    nothing_else = not modules and not any(hosted.values())
    all_of_them = "*" in environments
    names = () if all_of_them else environments
    registry = Registry.installed(names) if environments or nothing_else else Registry()
    added: list[str] = []
    for module in modules:
        before = set(registry.ids)
        registry.add_module(module)
        added += set(registry.ids) - before
    nothing: list[NothingFits] = []
    for family, text in ((family, text) for family, wanted in hosted.items() for text in wanted):
        try:
            added += registry.add_hosted(family, text)
        except NothingFits as error:
            if text != "*":
                raise
            nothing.append(error)  # all that there is, and there is none
    if nothing and not registry.ids:
        raise nothing[0]
    for each in nothing:
        logger.warning("%s", each)
    if (names or added) and not all_of_them:
        chosen = registry.select([*names, *added])
        return chosen, chosen.ids
    return registry, added


async def _serve(registry: Registry, config: ServerConfig, ready: TextIO) -> None:
    server = EnvironmentServer(registry, config)
    loop = asyncio.get_running_loop()
    terminate, interrupt = asyncio.Event(), asyncio.Event()

    def on_signal(event: asyncio.Event) -> None:
        # The second signal of any kind ends the drain.
        (interrupt if terminate.is_set() else event).set()
        terminate.set()

    loop.add_signal_handler(signal.SIGTERM, on_signal, terminate)
    loop.add_signal_handler(signal.SIGINT, on_signal, interrupt)
    await server.start()
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
    """Ends this process at once if a thread goes on in an environment's code: Python would wait for it for ever."""
    deadline = time.monotonic() + _LAST_SECONDS
    threads = [
        each
        for each in threading.enumerate()
        if each is not threading.main_thread() and (not each.daemon or each.name.startswith(THREAD_NAME))
    ]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(0)


def _end_with_stdin() -> None:
    """Ends this process when standard input closes, which it does with whoever holds its other end."""

    def watch() -> None:
        # Not through sys.stdin: its lock, held by a thread that waits, aborts the interpreter at exit.
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
