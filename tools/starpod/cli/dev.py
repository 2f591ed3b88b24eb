"""`starpod dev`: serve an environment's file, show it in a browser, and check it each time it is saved."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import click

from starpod.cli.web import DESKTOP, live_site, show
from starpod.client import SyncFleet
from starpod.client.programs import ServiceFailed, run_program

_POLL_SECONDS = 0.2


@click.command()
@click.argument("file", metavar="FILE.py", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Server's port; 0: any free.")
@click.option(
    "--open/--no-open",
    "opens",
    default=DESKTOP,
    help="Open the page in the browser. Default: if there is a desktop.",
)
def dev(file: Path, port: int, opens: bool) -> None:
    """Serve the environments of FILE.py, check them each time it is saved, and show a page to play them on.

    Runs until Ctrl-C. A mistake in the file is reported with its line, and the command waits for the next save.
    """
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as site:
        page = ""
        while True:
            save_time = _saved_at(file)
            # No drain: the page replays open games on the next server, which has the same address.
            words = ("serve", str(file), "--port", str(port), "--drain", "0")
            try:
                with run_program("the environment service", *words) as address:
                    port = int(address.rpartition(":")[2])
                    page = page or _show(address, site, opens)
                    _check(file, address)
                    _await_save(file, save_time)
            except ServiceFailed as error:
                _print_line(error.stderr, colour="red")
                _await_save(file, save_time)


def _show(address: str, site: contextlib.ExitStack, opens: bool) -> str:
    """Start the live site and return the address of the first environment's page, or the reason if it cannot start."""
    with SyncFleet(address) as fleet:
        environment = fleet.describe()[0].id
    click.echo(f"serving on {address}")
    try:
        page = f"{site.enter_context(live_site(address))}play/{environment}"
    except ServiceFailed as error:
        click.echo(f"no page to play on: {error.stderr}")
        return error.stderr
    show(page, opens=opens)
    return page


def _check(file: Path, address: str) -> None:
    """Print the requirements that the server does not meet."""
    command = [sys.executable, "-P", "-m", "starpod.cli.main", "check", address, "--reward", "--json", "-"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(process.stdout)
    except ValueError:
        _print_line(process.stderr.strip() or f"the check ended with status {process.returncode}", colour="red")
        return
    results = [result for environment in report["environments"] for result in environment["results"]]
    for result in results:
        if result["status"] in ("failed", "error"):
            colour = "red" if result["strength"] == "MUST" else "yellow"
            _print_line(
                f"{result['id']} {result['strength']} {result['title']}\n    {result['message']}", colour=colour
            )
    met_count = sum(result["status"] == "passed" for result in results)
    if report["passed"]:
        _print_line(f"{file.name} keeps the contract: {met_count} requirements shown", colour="green")


def _print_line(text: str, *, colour: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {click.style(text, fg=colour)}")


def _saved_at(file: Path) -> int:
    """Return when the file was last written, or 0 while an editor replaces it."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _await_save(file: Path, before: int) -> None:
    while _saved_at(file) in (before, 0):
        time.sleep(_POLL_SECONDS)
