"""Start the live site for a command in the terminal, and open it in a browser if there is a desktop."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import click

from starpod.client.programs import run_program

DESKTOP = bool(sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def live_site(address: str, words: Sequence[str] = ()) -> Iterator[str]:
    """Start a live site for the server at `address`, yield its URL, and stop it at the end.

    Args:
        address: address of the server.
        words: further arguments of `starpod ui`, such as credentials for the server.

    Raises:
        ServiceFailed: The site does not start, for example without the extra `ui`. The message is the site's own.
    """
    call = ("ui", "runs", "--address", address, "--port", "0", "--index", ":memory:", *words)
    with run_program("the live site", *call) as site:
        yield site


def show(page: str, *, opens: bool) -> None:
    """Print the address of the page, and open it in the browser if asked to."""
    click.echo(f"play it at {page}")
    if opens:
        click.launch(page)
