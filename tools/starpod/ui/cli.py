"""`starpod ui`: the command line."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from starpod.client.programs import start_server
from starpod.client.transport import Transport
from starpod.remote.catalog import access_options, expect_address, service_errors
from starpod.report.site import site_options
from starpod.serving.options import Command
from starpod.serving.sockets import end_process_with_stdin, is_loopback, link, listen
from starpod.ui.index import NAME, NotAnIndex, RunIndex

if TYPE_CHECKING:
    from starpod.ui.continuing import Continuing


@click.command(cls=Command, epilog="Example: starpod ui runs --serve frozen_lake --port 8090")
@click.argument("runs", default="runs", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--address", default="", show_default=False, metavar="HOST:PORT", help="Environment server to watch and to play on."
)
@click.option(
    "--serve",
    "served",
    multiple=True,
    metavar="ENVIRONMENT",
    help="Environment to start a server of and to play, instead of --address. Repeatable.",
)
@click.option(
    "--base-url",
    "endpoints",
    multiple=True,
    metavar="URL",
    help="OpenAI-compatible endpoint with a model that can continue episodes. Repeatable. Pages use no other endpoint.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Model of an endpoint. Give one per --base-url, in the same order, or several for a single "
    "--base-url. Repeatable.",
)
@site_options(port=8090)
@click.option(
    "--index",
    default="",
    metavar="FILE",
    show_default=f"RUNS/{NAME}",
    help="File for the index of runs, which makes the next start fast. :memory: writes none.",
)
@click.option(
    "--of-run", is_flag=True, hidden=True, help="Connect to the servers of the run in the folder RUNS while it trains."
)
@click.option("--end-with-stdin", is_flag=True, hidden=True, help="End when standard input closes.")
@access_options
def ui(
    access: Transport,
    runs: Path,
    address: str,
    served: tuple[str, ...],
    endpoints: tuple[str, ...],
    models: tuple[str, ...],
    host: str,
    port: int,
    hosts: tuple[str, ...],
    index: str,
    of_run: bool,
    end_with_stdin: bool,
) -> None:
    """Show runs, episodes and servers in a browser.

    RUNS is the folder of a run, or of many; by default, it is `runs`. Prints one line with the address when ready. If
    other machines can reach the site, the address contains a token. Anyone with this token sees everything, and plays
    with the token of --token-file.
    """
    if not (runs.is_dir() or end_with_stdin):  # a trainer creates its folder when the run begins
        raise click.UsageError(f"{runs} is not a folder: name the folder of your runs, such as that of --run-dir")
    if address:
        expect_address(address)
    if address and served:
        raise click.UsageError("--serve starts a server, and --address names one: give one of the two")
    model_endpoints = tuple(zip(endpoints * len(models) if len(endpoints) == 1 else endpoints, models, strict=False))
    if len(model_endpoints) != max(len(endpoints), len(models)) or (model_endpoints and not (address or served)):
        raise click.UsageError("an endpoint needs --base-url URL, --model NAME and a server (--serve or --address)")
    if end_with_stdin:  # it closes when the parent process ends
        end_process_with_stdin()
    from starpod.ui.continuing import Continuing
    from starpod.ui.games import Games
    from starpod.ui.policies import SitePolicies
    from starpod.ui.reading import servers_of

    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    try:
        with service_errors(), start_server(*served) if served else nullcontext(address) as server:
            source = (lambda: servers_of(runs)) if of_run else server
            continuing = Continuing(Games(source, access), SitePolicies(model_endpoints)) if source else None
            asyncio.run(_serve(runs, index, continuing, host=host, port=port, hosts={host, *hosts}, token=token))
    except NotAnIndex as error:
        raise click.BadParameter(str(error), param_hint="--index") from error
    except OSError as error:
        raise click.ClickException(str(error)) from error


async def _serve(
    runs: Path, index: str, continuing: Continuing | None, *, host: str, port: int, hosts: Collection[str], token: str
) -> None:
    from starpod.serving.http import serve
    from starpod.ui.app import create_app

    with closing(listen(host, port)) as listener:
        app = create_app(RunIndex(runs, index), continuing=continuing, hosts=hosts, token=token)
        print(link(listener, host) + (f"?token={token}" if token else ""), flush=True)
        await serve(app, listener)
