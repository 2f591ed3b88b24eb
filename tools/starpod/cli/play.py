"""`starpod play`: an environment as a game in the terminal, played over the network."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO
from urllib.parse import urlencode

import click
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from starpod.cli.web import DESKTOP, live_site, show
from starpod.client import Action, BadArgument, EndReason, Image, Part, SyncFleet, Transition
from starpod.client.programs import ServiceFailed
from starpod.remote.catalog import OPTIONS, VERSION, connection_options, find_environment, parse_options
from starpod.remote.game import SEPARATOR, Impossible, PlayedGame, parse_turn
from starpod.report.console import safe_console
from starpod.report.form import fields
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord
from starpod.v1.values import action_text

Reader = Callable[[Mapping[str, str]], str | None]
"""Function that returns the next line without its line end, or None at the end of the input.

Its argument maps each arrow key (`up`, `down`, `left`, `right`) to the line that the key stands for."""

_ARROW_KEYS = {"A": "up", "B": "down", "C": "right", "D": "left"}
_END = "\x04"
_ESCAPE = "\x1b"

ARROWS = ("up", "down", "left", "right")
COMMANDS = ("hint", "undo", "again", "new", "help", "quit")
ENDS = {
    EndReason.TERMINAL: "the task ended",
    EndReason.MAX_TURNS: "no turns left",
    EndReason.MAX_ACTIONS: "no actions left",
    EndReason.ENVIRONMENT_LIMIT: "the environment's limit was met",
}
SYMBOLS = {"#": "bright_black", "_": "bright_black", ".": "bright_black", "P": "bold cyan", "S": "bold cyan"}
SYMBOLS |= {"X": "bold yellow", "G": "bold green", "√": "bold green", "O": "bold magenta"}


@click.command(epilog="Example: starpod play frozen_lake --seed 3 --option size=6")
@connection_options
@click.argument("environment", metavar="[NAME]", default="")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), show_default="drawn by the server", help="Seed of the start state."
)
@OPTIONS
@VERSION
@click.option("--web", is_flag=True, help="Play in a browser. Prints the address of the page and runs until Ctrl-C.")
def play(
    connection: AbstractContextManager[SyncFleet],
    word: EnvironmentWord,
    environment: str,
    seed: int | None,
    assignments: Sequence[str],
    version: str,
    web: bool,
) -> None:
    """Play ENVIRONMENT in the terminal or in a browser.

    ENVIRONMENT is ADDRESS/NAME or ADDRESS NAME at a server (host:port). A NAME, FILE.py, FILE.py:CLASS or FAMILY:NAME
    is served by this command.

    Type an action and Enter, or use the arrow keys if the actions are directions. Separate several actions of one turn
    by ||. Other commands: hint, undo, again, new, help, quit. If standard input is not a terminal, each of its lines is
    one turn.
    """
    for signum in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # exit normally: close the session
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with connection as fleet:
        spec = find_environment(fleet.describe(), environment or word.id, version)
        options = parse_options(spec, assignments)
        if web:
            _play_in_browser(fleet.replicas[0].address, spec, _form_values(spec, options, seed), version)
            return
        with keys() if interactive else contextlib.nullcontext(read_line) as read:
            game = fleet.run(PlayedGame.open(fleet.fleet, spec, seed=seed, options=options))
            GameScreen(fleet, game, safe_console(highlight=False), clears=interactive).run(read)


def _form_values(spec: pb.EnvironmentSpec, options: Mapping[str, Any], seed: int | None) -> dict[str, str]:
    """Return the initial values of the page's form. Raise UsageError for an option that the form cannot hold."""
    names = {field.name for field in fields(spec.options_schema_json)}
    if missing := sorted(options.keys() - names):
        raise click.UsageError(f"a page's form has no field for {missing[0]}: play it in the terminal, without --web")
    values = {"seed": seed, **{f"option-{name}": value for name, value in options.items()}}
    boxes = {True: "on", False: ""}
    return {
        name: boxes[value] if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None
    }


def _play_in_browser(address: str, spec: pb.EnvironmentSpec, values: Mapping[str, str], version: str) -> None:
    """Serve the environment's page until Ctrl-C."""
    if version:
        raise click.UsageError("a page plays the newest version: leave --version or --web out")
    parameters = click.get_current_context().params
    words = []
    for name in ("token_file", "ca", "certificate", "key"):
        if parameters[name]:
            words += [f"--{name.replace('_', '-')}", str(parameters[name])]
    try:
        with contextlib.suppress(KeyboardInterrupt), live_site(address, words) as site:
            show(f"{site}play/{spec.id}" + (f"?{urlencode(values)}" if values else ""), opens=DESKTOP)
            while True:
                time.sleep(60)
    except ServiceFailed as error:
        raise click.ClickException(f"the page to play on did not start: {error.stderr}") from error


class GameScreen:
    """Shows a game after every turn and executes what the player types."""

    def __init__(self, fleet: SyncFleet, game: PlayedGame, console: Console, *, clears: bool) -> None:
        self._fleet = fleet
        self._game = game
        self._console = console
        self._clears = clears
        self._transitions: list[Transition] = []
        self._shortcuts = {name.lower(): name for name in game.spec.action_space.names if name.lower() in ARROWS}
        self._note: RenderableType = self._render_help()

    def run(self, read: Reader) -> None:
        """Play until the player quits or the input ends."""
        self._show()
        while True:
            if self._clears:
                self._console.print("[bold]>[/] ", end="")
            line = read(self._shortcuts)
            if not self._clears and line is not None:
                self._console.print(Text(f"> {line}", style="bold"))  # no terminal has echoed the line
            if line is None or not self._execute(line.strip()):
                return

    def _execute(self, line: str) -> bool:
        """Execute one line. Return False to quit."""
        game = self._game
        command = line.lower() if line.lower() in COMMANDS else ""
        if line.lower() in (name.lower() for name in game.spec.action_space.names):
            command = ""  # an action with a command's name takes precedence
        if command == "quit":
            return False
        try:
            match command:
                case "hint":
                    self._note = Text(self._hint(), style="cyan")
                case "undo":
                    self._fleet.run(game.undo(self._fleet.fleet))
                    self._transitions.pop()
                    self._note = Text("Took the last turn back.")
                case "again" | "new":
                    self._fleet.run(game.restart(again=command == "again"))
                    self._transitions = []
                    self._note = Text(f"A new episode, seed {game.session.seed}.")
                case "help":
                    self._note = self._render_help()
                case _ if line:
                    actions = parse_turn(line, game.spec)
                    self._transitions.append(self._fleet.run(game.step(actions)))
                    self._note = _describe_turn(actions, self._transitions[-1], len(self._transitions))
        except (Impossible, BadArgument) as problem:
            self._note = Text(str(problem), style="yellow")
        self._show()
        return True

    def _hint(self) -> str:
        if self._game.hint:
            return f"The expert would play: {self._game.hint}"
        if self._game.spec.capabilities.expert_action:
            raise Impossible("The expert knows no good action here.")
        raise Impossible(f"{self._game.spec.id} has no expert.")

    def _show(self) -> None:
        game = self._game
        if self._clears:
            self._console.clear()
        if self._clears or not self._transitions:
            spec = game.spec
            title = f" {spec.version}  {spec.title}  seed {game.session.seed}"
            self._console.print(Text.assemble((spec.id, "bold"), title))
        text = "\n".join(map(_part_text, game.session.observation.parts)).rstrip()
        picture = str(self._fleet.run(game.picture("text"))).rstrip() or text
        board = Panel(_colour(picture), title="state", title_align="left", padding=(0, 2), expand=False)
        self._console.print(Columns([board, self._render_status()], padding=(0, 1)))
        if text != picture:
            self._console.print(Panel(Text(text), title="what the agent sees", title_align="left", expand=False))
        self._console.print(self._note)
        if game.session.done:
            self._console.print(self._render_end())

    @property
    def _reward(self) -> float:
        return sum(transition.reward for transition in self._transitions)

    def _render_status(self) -> RenderableType:
        session, turn_count = self._game.session, len(self._transitions)
        limit = f" of {session.limits.max_turns}" if session.limits.max_turns else ""
        last_reward = self._transitions[-1].reward if self._transitions else 0.0
        table = Table(show_header=False, box=None, padding=(0, 1))
        table.add_row("turn", f"{turn_count}{limit}")
        table.add_row("reward", f"{last_reward:+g}")
        table.add_row("total", f"{self._reward:+g}")
        if session.observation.score is not None:
            table.add_row("score", f"{session.observation.score:.0%}")
        return table

    def _render_help(self) -> RenderableType:
        instructions, space = self._game.session.instructions, self._game.spec.action_space
        lines = [Text(instructions.rstrip())] if instructions else []
        lines.append(Text())
        if choices := self._game.choices:
            lines.append(Text.assemble(("Actions: ", "bold"), ", ".join(choices)))
        if space.grammar:
            lines.append(Text.assemble(("An action: ", "bold"), space.grammar))
        for tool in space.tools:
            lines.append(Text.assemble((tool.name, "bold"), f" {{JSON}}: {tool.description}"))
        keys = "arrow keys, " if self._shortcuts and self._clears else ""
        hint = f"several a turn: A {SEPARATOR} B; "
        lines.append(Text(f"{keys}{hint}also {', '.join(COMMANDS)}", style="bright_black"))
        return Group(*lines)

    def _render_end(self) -> RenderableType:
        session, turn_count = self._game.session, len(self._transitions)
        success = self._transitions[-1].success
        verdict, style = {True: ("Solved", "green"), False: ("Not solved", "red"), None: ("Over", "bold")}[success]
        turns = f"{turn_count} turn{'s'[: turn_count != 1]}"
        text = f"{verdict}: {ENDS[session.end_reason]} after {turns}, total reward {self._reward:+g}"
        return Panel(Text(text, style=style), expand=False, border_style=style)


def _describe_turn(actions: Sequence[Action], transition: Transition, number: int) -> Text:
    """Describe a turn in one line: what each action did and earned."""
    text = Text(f"Turn {number}: ")
    for index, (action, outcome) in enumerate(zip(actions, transition.outcomes, strict=True)):
        if index:
            text.append("; ")
        text.append(action_text(action), style="bold")
        if not outcome.valid:
            text.append(" was invalid", style="yellow")
        elif not outcome.executed:
            text.append(" was not tried", style="yellow")
        elif not outcome.effective:
            text.append(" changed nothing", style="yellow")
        if outcome.executed:
            text.append(f" ({outcome.reward:+g})", style="green" if outcome.reward > 0 else "")
    criteria = [name for name, holds in transition.criteria.items() if holds]
    if criteria:
        text.append(f"; held: {', '.join(criteria)}")
    return text


def _part_text(part: Part) -> str:
    """Return a part of an observation as text, or a short description of a picture."""
    return f"[{part.mime}, {len(part.data):,} bytes]" if isinstance(part, Image) else action_text(part)


def _colour(picture: str) -> Text:
    """Colour the usual symbols of a board; other text stays as it is."""
    text = Text(picture)
    lines = [line for line in picture.splitlines() if line.strip()]
    if len(lines) >= 3 and not any(character.islower() for line in lines for character in line):
        for index, character in enumerate(picture):
            if character in SYMBOLS:
                text.stylize(SYMBOLS[character], index, index + 1)
    return text


# --- the keyboard -----------------------------------------------------------------------------------------------------


def read_line(shortcuts: Mapping[str, str]) -> str | None:
    """Return the next line of standard input, or None at its end. Shortcuts are ignored."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@contextlib.contextmanager
def keys() -> Iterator[Reader]:
    """Yield a reader of lines from the terminal. On an empty line, an arrow key returns its shortcut at once.

    The terminal delivers single keys until the context ends, so that keys typed ahead are not lost between turns.
    """
    import termios  # not on Windows, where only `read_line` works
    import tty

    descriptor = sys.stdin.fileno()
    saved_settings = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    key = _make_key_reader(descriptor)
    try:
        yield lambda shortcuts: _edit_line(key, shortcuts, sys.stdout)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved_settings)


def _make_key_reader(terminal: int) -> Callable[[], str]:
    """Return a function that reads one key: a character, an arrow's name, or an empty text at the end of the input."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def character() -> str:
        while data := os.read(terminal, 1):
            if text := decoder.decode(data):
                return text
        return ""

    def key() -> str:
        first = character()
        if first != _ESCAPE:
            return first
        if character() not in ("[", "O"):
            return _ESCAPE
        return _ARROW_KEYS.get(character(), _ESCAPE)

    return key


def _edit_line(key: Callable[[], str], shortcuts: Mapping[str, str], echo: TextIO) -> str | None:
    line = ""
    while True:
        pressed_key = key()
        if pressed_key == "" or (pressed_key == _END and not line):
            return None
        if pressed_key in ("\n", "\r"):
            echo.write("\n")
            return line
        if pressed_key in shortcuts and len(pressed_key) > 1:
            if not line:
                return shortcuts[pressed_key]
        elif pressed_key in ("\x7f", "\b"):
            if line:
                line = line[:-1]
                echo.write("\b \b")
        elif pressed_key.isprintable() and len(pressed_key) == 1:
            line += pressed_key
            echo.write(pressed_key)
        echo.flush()
