"""The live site beside a command of the terminal: started, and opened where there is a desktop."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import click

from starpod.client.programs import started

DESKTOP = bool(sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def live_site(address: str, words: Sequence[str] = ()) -> Iterator[str]:
    """Yield the address of a live site over the server at `address`, which ends with the context.

    words: further ones of its call, such as what the server asks of its callers. Raises ServiceFailed with its own
    words where it does not start, as without the extra `ui`.
    """
    call = ("ui", "runs", "--address", address, "--port", "0", "--index", ":memory:", *words)
    with started("the live site", *call) as site:
        yield site


def show(page: str, *, opens: bool) -> None:
    """Tell where the page is, and opens it in the browser if asked to."""
    click.echo(f"play it at {page}")
    if opens:
        click.launch(page)
