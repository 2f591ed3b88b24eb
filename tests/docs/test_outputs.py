"""Commands print what pages show below them, apart from numbers.

A block ```text after a block of shell or Python, in the same section, is what the first command there prints.
"""

import re
from itertools import pairwise

import pytest

from tests.docs.pages import FENCE, Block, blocks
from tests.docs.reader import Reader
from tests.support import ROOT

SERVED = ("operations.md", "client.md", "http.md", "mcp.md", "hosting.md", "webshop.md")
"""Pages whose first command is `starpod serve`."""
FIRST_RUN = ("training.md", "run-folder.md", "evaluation.md")
"""Pages of one run, in the order in which a reader needs them."""


def shown(page: str) -> list[tuple[Block, str]]:
    """Each output of a page, after the block that prints it."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = []
    for before, output in pairwise(FENCE.finditer(text)):
        same_section = "\n#" not in text[before.end() : output.start()]
        if output["language"] == "text" and before["language"] in ("", "sh", "python") and same_section:
            found.append((blocks(before[0])[0], output["text"]))
    return found


def follow(reader: Reader, page: str) -> None:
    outputs = shown(page)
    assert outputs
    for block in blocks((ROOT / "docs" / page).read_text(encoding="utf-8")):
        reader.save(block)
    for block, output in outputs:
        if block.language == "python":
            reader.python(block)
        elif block.commands[0].startswith("starpod serve"):
            reader.serve(re.sub(r"--http \d+", "--http 0", block.commands[0]))
        elif block.commands[0].startswith("starpod"):
            reader.starpod(block.commands[0])
        else:
            reader.run(*block.commands[0].split())
        reader.compare(output)


@pytest.mark.parametrize("page", [*SERVED, "algorithms.md", "configuration.md", "prompts.md"])
def test_the_first_commands(page: str, reader: Reader) -> None:
    follow(reader, page)


def test_a_file_of_tasks(reader: Reader) -> None:
    for block in blocks((ROOT / "docs/tasks.md").read_text(encoding="utf-8")):
        reader.save(block)
    follow(reader, "tasks.md")


@pytest.mark.minutes
def test_the_first_run(reader: Reader) -> None:
    for page in FIRST_RUN:
        follow(reader, page)
