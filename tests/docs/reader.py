"""Someone who follows a page: saves its files, runs its commands and programs, and compares what they print."""

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from starpod.cli.main import main
from tests.docs.pages import ADDRESS, Block, words
from tests.support import ServerProcess, start_server

SAVED = re.compile(r"(?:[Ss]ave this as|(?P<more>[Aa]dd this to)) `(?P<file>[\w.]+)`")
"""In the line of prose above a block: the file that it is, or whose end it is."""


@dataclass
class Reader:
    """Someone who follows a page: a folder with what was saved, and the server that was started last."""

    folder: Path
    shared: ServerProcess
    servers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    address: str = ""
    printed: str = ""
    """Output of the last command or program."""

    def serve(self, command: str) -> None:
        arguments = [
            str(self.folder / word) if word.endswith((".py", ".jsonl")) else word for word in words(command)[2:]
        ]
        self.servers.close()
        server = self.servers.enter_context(start_server(*arguments)) if arguments else self.shared
        self.address = server.address
        self.printed = server.ready

    def starpod(self, command: str, *more: str, typed: str = "hint\nquit\n") -> str:
        """Runs a command in this process, in the reader's folder. Returns what it wrote."""
        assert ADDRESS not in command or self.address, f"no server has been started for {command!r}"
        arguments = words(command.replace(ADDRESS, self.address))[1:]
        written, stdin, called = io.StringIO(), sys.stdin, list(sys.argv)
        sys.stdin = io.StringIO(typed)
        try:
            with (
                contextlib.redirect_stdout(written),
                contextlib.redirect_stderr(written),
                contextlib.chdir(self.folder),
                patch.dict(os.environ, {"COLUMNS": "80"}),
                pytest.raises(SystemExit) as exit_,
            ):
                main([*arguments, *more])
        finally:
            sys.stdin, sys.argv[:] = stdin, called
        self.printed = written.getvalue().replace(f"{self.folder}/", "")
        assert not exit_.value.code, f"{command}\n{self.printed}"
        return self.printed

    def save(self, block: Block) -> bool:
        """Saves a block if the prose above it says so. Returns whether it does."""
        saved = SAVED.search(block.before)
        if saved:
            with (self.folder / saved["file"]).open("a" if saved["more"] else "w") as file:
                file.write(("\n" if saved["more"] else "") + block.text)
        return bool(saved)

    def python(self, block: Block) -> None:
        if self.save(block):
            return
        self.run(sys.executable, "-c", block.text.replace(ADDRESS, self.address))
        assert self.printed, "an example that shows nothing"

    def run(self, *command: str) -> None:
        """Runs another program in the reader's folder."""
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=250)
        self.printed = done.stdout
        assert done.returncode == 0, done.stdout + done.stderr

    def compare(self, shown: str) -> None:
        """Compares what the page shows with what was printed. `...` is any lines, or the rest of a line.

        Numbers, and the spaces and rules that fill lines, may differ.
        """
        lines = (r"(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in masked(shown))
        pattern = "".join(lines).replace(re.escape("..."), ".*")
        told = "\n".join(masked(self.printed)) + "\n"
        assert re.fullmatch(pattern, told), f"the page shows\n{shown}\nbut this was printed:\n{self.printed}"


def masked(text: str) -> list[str]:
    """The lines of a text with 0 for each number, and one space for the spaces and rules that fill a line."""
    lines = re.sub(r"(\B-)?\d[\d.,]*", "0", text.strip()).splitlines()
    return [re.sub(r"[ \u2500\u2501]+", " ", line).strip() for line in lines]
