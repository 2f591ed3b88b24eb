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
from starpod.client.programs import ServiceFailed, start_server
from starpod.client.versions import latest_name
from starpod.remote.catalog import WORD
from starpod.v1.environment_word import EnvironmentWord

_POLL_SECONDS = 0.2


@click.command(epilog="Example: starpod dev mine.py")
@click.argument("word", metavar="ENVIRONMENT", type=WORD)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port of the server; 0: any free port.")
@click.option(
    "--open/--no-open",
    "opens",
    default=DESKTOP,
    show_default="open if there is a desktop",
    help="Whether to open the page in the browser.",
)
def dev(word: EnvironmentWord, port: int, opens: bool) -> None:
    """Serve an environment while you write it, check it each time you save it, and show a page to play it on.

    ENVIRONMENT is FILE.py, FILE.py:CLASS or the ./FOLDER of a package. A NAME, FAMILY:NAME or ADDRESS/NAME is checked
    only once. Runs until Ctrl-C. A mistake in the file is reported with its line, and the command waits until you save
    the file again.
    """
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as site:
        page = ""
        while True:
            save_time = _saved_at(word.path)
            # No drain: the page replays open games on the next server, which has the same address.
            try:
                server = start_server(word.serve, "--drain", "0", port=port)
                with contextlib.nullcontext(word.addresses) if word.addresses else server as address:
                    port = int(address.rpartition(":")[2])
                    page = page or _show(address, word.id, site, opens)
                    _check(word, address)
                    _await_save(word.path, save_time)
            except ServiceFailed as error:
                _print_line(error.stderr, colour="red")
                _await_save(word.path, save_time)


def _show(address: str, environment: str, site: contextlib.ExitStack, opens: bool) -> str:
    """Start the live site and return the address of the first environment's page, or the reason if it cannot start."""
    with SyncFleet(address) as fleet:
        ids = [spec.id for spec in fleet.describe()]
    click.echo(f"serving on {address}")
    try:
        page = f"{site.enter_context(live_site(address))}play/{latest_name(environment, ids) or ids[0]}"
    except ServiceFailed as error:
        click.echo(f"no page to play on: {error.stderr}")
        return error.stderr
    show(page, opens=opens)
    return page


def _check(word: EnvironmentWord, address: str) -> None:
    """Print the requirements that the server does not meet."""
    served = f"{address}/{word.id}".rstrip("/")
    command = [sys.executable, "-P", "-m", "starpod.cli.main", "check", served, "--reward", "--json", "-"]
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
        _print_line(f"{word.source} keeps the contract: {met_count} requirements shown", colour="green")


def _print_line(text: str, *, colour: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {click.style(text, fg=colour)}")


def _saved_at(path: Path | None) -> int:
    """Return when the file or a package's last file was written; 0 without one, or while an editor replaces it."""
    try:
        return max(file.stat().st_mtime_ns for file in (path.glob("*.py") if path.is_dir() else [path])) if path else 0
    except FileNotFoundError:
        return 0


def _await_save(path: Path | None, before: int) -> None:
    while _saved_at(path) in (before, 0):
        time.sleep(_POLL_SECONDS)
