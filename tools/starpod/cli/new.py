"""`starpod new`: write the files with which a new environment begins."""

from __future__ import annotations

import importlib.machinery
import keyword
import os
import re
import shlex
import sys
from importlib import resources
from pathlib import Path

import click

from starpod.serving.options import Command

FILES = {"environment": "{file}.py", "configuration": "{file}.yaml", "test": "test_{file}.py"}
"""Pattern for the name of the file that is made from each template."""
_CONDITION = re.compile(r"\[(no )?(options|expert)\]")


@click.command(cls=Command, epilog="Example: starpod new vault --expert")
@click.argument("name")
@click.option(
    "--options", "with_options", is_flag=True, help="Give the environment options, such as the size of the task."
)
@click.option(
    "--expert",
    "with_expert",
    is_flag=True,
    help="Give the environment an expert, whose play a policy can imitate and be compared with.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=".", help="Folder for the files.")
def new(name: str, with_options: bool, with_expert: bool, out: Path) -> None:
    """Write an environment NAME in one file, a configuration to train on it, and a test.

    The environment works as it is: the agent turns a dial until a vault opens. Replace this task by yours.
    """
    file = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", file) or keyword.iskeyword(file):
        raise click.UsageError(
            f"{name!r} is not a name for an environment: use a-z, 0-9 and _, beginning with a letter"
        )
    if file in ("starpod", "test") or file in sys.stdlib_module_names or _is_installed(file):
        raise click.UsageError(f"{file}.py would hide a module of that name: choose another one")
    title = file.replace("_", " ").capitalize()
    values = {"file": file, "id": f"{file}-v1", "title": title, "name": title.title().replace(" ", "")}
    texts = {
        out / pattern.format(**values): fill(template, values, options=with_options, expert=with_expert)
        for template, pattern in FILES.items()
    }
    if existing_paths := [str(path) for path in texts if path.exists()]:
        raise click.UsageError(f"{existing_paths[0]} exists already: nothing is overwritten")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    environment, configuration, test = texts
    word = shlex.quote(str(environment))
    click.echo(
        f"{environment}  the environment {values['id']}\n{configuration}  how to train on it\n{test}  its test\n\n"
        f"starpod dev {word}    # play it in a browser; it is checked each time you save\n"
        f"starpod train {word}  # a tiny policy learns it"
    )


def _is_installed(name: str) -> bool:
    """Return whether a module of that name can be imported from a folder other than the working folder."""
    finder = importlib.machinery.PathFinder()
    return finder.find_spec(name, [path for path in sys.path if path not in ("", os.getcwd())]) is not None


def fill(template: str, values: dict[str, str], **parts: bool) -> str:
    """Return a template's text with the values filled in.

    A line that begins with `[WORD]` is kept if `parts[WORD]` is true, and a line with `[no WORD]` if it is false.
    """
    lines = []
    for line in resources.files("starpod.cli").joinpath(f"templates/{template}.txt").read_text("utf-8").splitlines():
        if condition := _CONDITION.match(line):
            if parts[condition[2]] == bool(condition[1]):
                continue
            line = line[condition.end() :]
        for name, value in values.items():
            line = line.replace(f"{{{name}}}", value)
        lines.append(line)
    return "\n".join(lines) + "\n"
