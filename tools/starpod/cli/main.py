"""The `starpod` command. Each subcommand's module is imported only when that subcommand is called."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import click

from starpod.cli.polling import prefer_poller

# click 8.2 raises this for a group without a command, with its help as the message. Earlier versions print the help.
click.IntRange.name, click.FloatRange.name = "integer", "number"  # instead of "'x' is not a valid integer range"
NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


def _convert_path(path: click.Path, value: Any, *place: Any) -> Any:
    # Path("") is the working folder. The user more likely passed an unset variable of the shell.
    if value == "":
        path.fail("the name is empty: give one, or leave this out", *place)
    return _CONVERT_PATH(path, value, *place)


_CONVERT_PATH = click.Path.convert
click.Path.convert = _convert_path  # type: ignore[assignment, method-assign]


class Subcommand:
    """A subcommand that is not imported yet.

    Args:
        target: where its click command is, as `module:attribute`.
        summary: its line in `starpod --help`.
        extra: package extras that the subcommand needs, with commas between them.
    """

    def __init__(self, target: str, summary: str, extra: str = "") -> None:
        self.module, _, self.attribute = target.partition(":")
        self.summary = summary
        self.extra = extra

    def load(self) -> click.Command:
        """Import the command."""
        command: click.Command = getattr(importlib.import_module(self.module), self.attribute)
        return command

    def expect_package(self, error: ModuleNotFoundError) -> None:
        """Raise ClickException if the missing package may be one of the extras."""
        package = (error.name or "").partition(".")[0]
        if self.extra and package not in ("", "starpod"):
            hint = f"from a clone of the repository: pip install '.[{self.extra}]'"
            raise click.ClickException(f"this command needs the package {package}; {hint}") from error


SUBCOMMANDS = {
    "new": Subcommand("starpod.cli.new:new", "Write a new environment from a template."),
    "dev": Subcommand("starpod.cli.dev:dev", "Serve and check an environment while you write it."),
    "serve": Subcommand("starpod.env_server.cli:serve", "Serve environments.", extra="server"),
    "webshop": Subcommand(
        "starpod.environments.webshop.cli:webshop", "Build, inspect and open shops for webshop-v1.", extra="webshop"
    ),
    "list": Subcommand("starpod.cli.listing:list_environments", "List what a server hosts."),
    "describe": Subcommand("starpod.cli.listing:describe", "Show one environment: actions, options, limits."),
    "play": Subcommand("starpod.cli.play:play", "Play an environment in the terminal."),
    "train": Subcommand("starpod.trainer.commands.train:train", "Train a policy on environments.", extra="trainer"),
    "export": Subcommand(
        "starpod.trainer.commands.export:export", "Write a trained model for transformers and vLLM.", extra="trainer"
    ),
    "export-episodes": Subcommand(
        "starpod.trainer.commands.export_episodes:export_episodes", "Write episodes for other tools.", extra="trainer"
    ),
    "vllm": Subcommand(
        "starpod.trainer.commands.vllm:vllm", "Start a vLLM server from which training samples.", extra="trainer"
    ),
    "eval": Subcommand("starpod.trainer.commands.eval:evaluate", "Measure how well a policy plays.", extra="trainer"),
    "rescore": Subcommand(
        "starpod.trainer.commands.rescore:rescore", "Give recorded episodes new rewards.", extra="trainer"
    ),
    "watch": Subcommand("starpod.trainer.commands.watch:watch", "Replay recorded episodes.", extra="trainer"),
    "ui": Subcommand("starpod.ui.cli:ui", "Show runs, episodes and servers in a browser.", extra="ui"),
    "gateway": Subcommand(
        "starpod.gateway.cli:gateway",
        "Serve a model to unmodified agents, and keep their tokens.",
        extra="gateway,trainer",
    ),
    "check": Subcommand("starpod.check.cli:check", "Check that an environment keeps the contract."),
    "hub": Subcommand(
        "starpod.check.hub:hub", "Check all installed environments and write a page about each.", extra="server"
    ),
    "load": Subcommand("starpod.load.cli:load", "Measure how much load a server sustains.", extra="load"),
}


class LazyGroup(click.Group):
    """A click group that imports a command only when the command is called, not when the help lists it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        subcommand = SUBCOMMANDS.get(cmd_name)
        return subcommand.load() if subcommand else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in SUBCOMMANDS and not name.startswith("-"):
            from starpod.v1.spelling import nearest  # not at the top: it loads gRPC, after `prefer_poller`

            raise click.UsageError(f"no command {name!r}{nearest(name, list(SUBCOMMANDS))}", ctx)
        ctx.invoked_subcommand = name  # click sets it after the import
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand in SUBCOMMANDS:
                SUBCOMMANDS[ctx.invoked_subcommand].expect_package(error)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, subcommand.summary) for name, subcommand in SUBCOMMANDS.items()])


def _installed_version() -> str:
    try:
        return version("starpod")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Example: starpod train frozen_lake",
)
@click.version_option(_installed_version(), prog_name="starpod")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def starpod(debug: bool) -> None:
    """Environments for LLM agents as stateful gRPC services."""


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def reach_loopback_directly() -> None:
    """Exclude this machine from proxies (http_proxy and others), in this process and in programs that it starts."""
    exceptions = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    values = {"no_proxy": exceptions, "NO_PROXY": exceptions}
    if (no_proxy := os.environ.get("no_grpc_proxy")) is not None:  # noqa: SIM112 - gRPC reads only this spelling
        values["no_grpc_proxy"] = no_proxy
    for variable, value in values.items():
        names = [name.strip() for name in value.split(",") if name.strip()]
        if "*" not in names:
            names += [name for name in LOOPBACK if name not in names]
        os.environ[variable] = ",".join(names)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with 0 (done), 1 (something failed) or 2 (wrong call).

    Errors are one line on standard error. With `--debug` anywhere on the command line, the traceback is shown instead.
    """
    arguments_given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments_given
    prefer_poller()
    reach_loopback_directly()
    if not debug:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would log what our error message says
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters
    if isinstance(sys.stdin, io.TextIOWrapper):
        # As for arguments, bytes that are not UTF-8 are kept, so that the reader of a line can name them.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    arguments_given, output = [argument for argument in arguments_given if argument != "--debug"], sys.stdout
    sys.argv[1:] = arguments_given  # `serve` passes them to its workers
    try:
        status = starpod.main(arguments_given, prog_name="starpod", standalone_mode=False)
    except click.exceptions.Abort:
        status = 130
    except NO_COMMAND as error:
        print(error.format_message(), file=sys.stderr)
        status = error.exit_code
    except click.ClickException as error:
        _print_error(error.format_message(), debug)
        status = error.exit_code
    except SystemExit as error:
        # If the reader of the output has ended, such as `head`, click replaces the stream and rich raises SystemExit,
        # both with status 1. Other programs end by SIGPIPE.
        is_pipe_closed = sys.stdout is not output or isinstance(error.__context__, BrokenPipeError)
        status = 128 + signal.SIGPIPE if is_pipe_closed else error.code
    except Exception as error:
        _print_error(_describe_error(error), debug)
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.strerror == os.strerror(error.errno):
        return f"{error.filename}: {error.strerror}" if error.filename else f"cannot write or read: {error.strerror}"
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:100]!r} is not UTF-8: write it in UTF-8"
    return str(error) or type(error).__name__


def _print_error(message: str, debug: bool) -> None:
    """Print an error as one line, or the traceback of the error that is being handled."""
    if debug:
        traceback.print_exc()
    else:
        from starpod.report.console import visible  # imports rich, which is slow

        print("starpod:", visible(" ".join(message.split())), file=sys.stderr)


if __name__ == "__main__":
    main()
