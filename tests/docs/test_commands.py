"""Commands that pages show exist: subcommands and options of `starpod`, targets of make, modules of benchmarks,
extras that are to be installed."""

import re
import tomllib
from pathlib import Path

import click
import pytest

from starpod.cli.main import starpod
from tests.docs.pages import blocks, inline, is_benchmark, name_of, pages, words
from tests.support import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def starpod_command(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words call, and the words that are left for it."""
    command: click.Command = starpod
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"no command {name!r}"
        command = found
    return command, arguments


def parse(arguments: list[str]) -> None:
    """Parses a whole call without running it. Files that it names need not exist."""
    command, rest = starpod_command(arguments)
    command.make_parser(click.Context(command, **command.context_settings)).parse_args(rest)


def look_up(arguments: list[str]) -> None:
    """Looks up the options that a piece of prose names; it may leave out whatever else a call needs."""
    command, rest = starpod_command(arguments)
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}
    unknown = [word for word in rest if re.match(r"--[a-z]", word) and word.partition("=")[0] not in known]
    assert unknown == []


def called(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """The words after `starpod`: in blocks, and in prose where at least a subcommand is named."""
    shell = [command for block in blocks(text) if block.is_shell for command in block.commands]
    full = [words(command)[1:] for command in shell if command.startswith("starpod ")]
    partial = [words(code)[1:] for code in inline(text) if re.match(r"starpod [a-z]", code)]
    return full, [call for call in partial if call]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_starpod_has_what_the_page_shows(page: Path) -> None:
    full, partial = called(page.read_text(encoding="utf-8"))
    wrong = []
    for calls, verify in ((full, parse), (partial, look_up)):
        for call in calls:
            try:
                verify(list(call))
            except (click.ClickException, AssertionError) as error:
                reason = error.format_message() if isinstance(error, click.ClickException) else str(error)
                wrong.append(f"starpod {' '.join(call)}: {reason}")
    assert wrong == []


def test_the_pages_show_commands() -> None:
    calls = [called(page.read_text(encoding="utf-8")) for page in pages()]
    assert sum(len(full) for full, _ in calls) > 60
    assert sum(len(partial) for _, partial in calls) > 40


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_targets_and_benchmarks_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = [*inline(text), *(command for block in blocks(text) if block.is_shell for command in block.commands)]
    targets = {name for piece in code for name in re.findall(r"(?:^|[;&] )make ([a-z][a-z-]*)", piece)}
    assert {name for name in targets if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)} == set()
    modules = {name for piece in code for name in re.findall(r"python -m benchmarks\.([a-z_.]+)", piece)}
    assert {name for name in modules if not is_benchmark(name)} == set()


def test_what_is_to_be_installed_can_be() -> None:
    """Starpod is on no package index: pages and errors install a clone with existing extras."""
    sources = [
        file
        for folder in ("client", "env_server", "environments", "tools", "trainer")
        for file in (ROOT / folder).rglob("*.py")
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in [*pages(), *sources])
    assert re.findall(r"pip install .*starpod\[.*", text) == []
    wanted = {extra for extras in re.findall(r"pip install '\.\[([a-z,]+)\]'", text) for extra in extras.split(",")}
    assert wanted
    assert wanted <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
