"""Commands print what pages show below them, apart from numbers.

A block ```text after a block of shell or Python, in the same section, is what the first command there prints. A line
`...` leaves out any number of lines.
"""

import contextlib
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import ADDRESS, FENCE, blocks, words
from tests.support import ROOT, start_server

FIRST_RUN = ("training.md", "run-folder.md", "evaluation.md")
"""Pages of one run, in the order in which a reader needs them."""
SERVED = ("operations.md", "client.md", "http.md", "mcp.md", "hosting.md", "webshop.md")
"""Pages whose first command is `starpod serve`."""


def shown(page: str) -> list[tuple[str, str, str]]:
    """Each output of a page: the language of the block that prints it, that block's first command, and the output."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    fences, found = list(FENCE.finditer(text)), []
    for before, output in pairwise(fences):
        between = text[before.end() : output.start()]
        if output["language"] == "text" and before["language"] in ("", "sh", "python") and "\n#" not in between:
            (block,) = blocks(before[0])
            command = block.text if block.language == "python" else block.commands[0]
            found.append((before["language"], command, output["text"]))
    return found


def shape(text: str) -> list[str]:
    """Return the lines of a text without numbers and blanks."""
    lines = [re.sub(r"[\d.,]*\d", "#", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip()]


def compare(told: str, printed: str) -> None:
    """Each line that a page shows is printed, in this order, and no other between them, except at `...`."""
    lines = shape(printed)
    place = 0
    for part in re.split(r"^\.\.\.$", told, flags=re.MULTILINE):
        wanted = shape(part)
        places = [at for at in range(place, len(lines)) if lines[at : at + len(wanted)] == wanted]
        assert places, f"not printed:\n{part}\nbut:\n{printed}"
        place = places[0] + len(wanted)


@pytest.mark.parametrize("page", SERVED)
def test_what_a_server_and_its_client_print(page: str) -> None:
    address = ""
    with contextlib.ExitStack() as servers:
        for language, command, told in shown(page):
            if language == "python":
                program = [sys.executable, "-c", command.replace(ADDRESS, address)]
                done = subprocess.run(program, capture_output=True, text=True, timeout=250)
                assert (done.stdout, done.stderr) == (told, "")
            else:
                name, serve, *arguments = words(re.sub(r"--http \d+", "--http 0", command))
                assert (name, serve) == ("starpod", "serve")
                server = servers.enter_context(start_server(*arguments))
                address = server.address
                compare(told, server.ready)


@pytest.mark.minutes
def test_what_the_first_run_prints(tmp_path: Path) -> None:
    ran = 0
    for page in FIRST_RUN:
        for _, command, told in shown(page):
            program, *arguments = words(command)
            called = [sys.executable, "-m", "starpod.cli.main"] if program == "starpod" else [program]
            done = subprocess.run([*called, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=1800)
            assert done.returncode == 0, done.stderr
            compare(told, done.stdout + done.stderr)
            ran += 1
    assert ran == 3


def test_the_configuration_that_the_page_of_algorithms_shows() -> None:
    ((_, command, told),) = shown("algorithms.md")
    called = [sys.executable, "-m", "starpod.cli.main", *words(command)[1:]]
    done = subprocess.run(called, capture_output=True, text=True, timeout=250)
    compare(told, done.stdout)
