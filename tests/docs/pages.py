"""Parts of the project's Markdown pages: fenced blocks, commands, tables, links and anchors."""

import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(^|\s+)# .*$")
LINK = re.compile(r"!?\[(?:[^\]\[]|!?\[[^\]]*\])*\]\(([^)\s]+)\)")
ADDRESS = "127.0.0.1:50051"
"""The address of a server, in every example."""


def pages() -> list[Path]:
    """Every page of the project, not those of packages that were installed into its folders."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("examples/*/*.md")]
    return sorted([*found, *ROOT.glob("deploy/**/*.md")])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block. `before` is the line of prose above it."""

    language: str
    text: str
    before: str

    @property
    def is_shell(self) -> bool:
        return self.language in ("", "sh", "bash", "console")

    @property
    def commands(self) -> list[str]:
        """Return the block's lines without comments, with continued lines joined."""
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        return [bare for line in lines if (bare := COMMENT.sub("", line).strip())]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(found["language"], found["text"], text[: found.start()].rstrip().rpartition("\n")[2])
        for found in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def inline(text: str) -> list[str]:
    """The pieces of code in the prose of a page, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def words(command: str) -> list[str]:
    """A command as the shell would cut it; a piece of prose that no shell would take has no words.

    What the shell would fill in, `$(command)`, is one word.
    """
    try:
        return shlex.split(re.sub(r"\$\([^)]*\)", "filled-in", command))
    except ValueError:
        return []


def table(text: str, first_cell: str) -> list[list[str]]:
    """The rows of the table whose head begins with this cell, as cells, without its head."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return LINK.findall(re.sub(r"`[^`]*`", "", prose(text)))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        copies = [anchor, *(f"{anchor}-{number}" for number in range(1, 20))]
        found.add(next(copy for copy in copies if copy not in found))
    return found


def is_there(module: str, name: str = "") -> bool:
    """Whether a module of Starpod has this name. One that needs a package which is not installed here may have it."""
    try:
        return hasattr(importlib.import_module(module), name or "__name__") or is_there(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("starpod")


def is_benchmark(name: str) -> bool:
    """Whether `python -m benchmarks.NAME` runs: a module with a command line, or a folder with a `__main__`."""
    path = ROOT / "benchmarks" / name.replace(".", "/")
    module = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return module.exists() and '__name__ == "__main__"' in module.read_text(encoding="utf-8")
