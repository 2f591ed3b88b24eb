"""The command line as a person meets it: in this process, and as one where signals, terminals and pipes matter."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from starpod.cli import main
from starpod.cli.main import SUBCOMMANDS, _describe_error
from starpod.cli.main import starpod as group
from starpod.cli.polling import VARIABLE
from starpod.client import SyncFleet
from tests.support import ROOT, ServerProcess, credentials, run_starpod, start_server

COMMAND = (sys.executable, "-m", "starpod.cli.main")
LAKE = '["SFF", "FHF", "FFG"]'


@pytest.fixture(scope="module")
def bandit() -> Iterator[ServerProcess]:
    with start_server("bandit") as server:
        yield server


# --- the frame ---------------------------------------------------------------------------------------------------


def test_each_subcommand_has_help() -> None:
    result = run_starpod("--help")
    assert result.status == 0 and all(f"  {name} " in result.out for name in SUBCOMMANDS)
    for name in SUBCOMMANDS:
        result = run_starpod(name, "--help")
        assert (result.status, result.err) == (0, "") and result.out.startswith(f"Usage: starpod {name} ")


MISTAKES = {
    "eval --help": 0,
    "vllm --help": 0,
    "eval bandit nowhere": 2,
    "train --list": 0,
    "train --nothing": 2,
    "train nothing": 2,
    "train bandit lr=1": 2,
}
IMPORTS = """
import contextlib, io, json, os, sys
import starpod.cli.main as cli

def loaded(*names):
    return [name for name in names if name in sys.modules]

seen = [loaded("grpc", "torch", "starpod.client", "starpod.v1")]
cli.prefer_poller()
seen += [bool(os.environ.get(sys.argv[1])), loaded("grpc")]
for name in ("list", "describe", "play"):
    cli.SUBCOMMANDS[name].load()
seen.append(loaded("grpc", "starpod.env_server", "pydantic"))
for words in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(words.split())
        except SystemExit as end:
            seen.append(end.code or 0)
print(json.dumps([*seen, loaded("torch", "transformers")]))
"""


def test_what_a_command_does_not_need_is_not_imported() -> None:
    """gRPC only after its poller is chosen, no server for commands of the client, and no torch, which takes seconds,
    for help and mistakes."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    words = [sys.executable, "-c", IMPORTS, VARIABLE, *MISTAKES]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], True, [], ["grpc"], *MISTAKES.values(), []]


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all commands below it, by the words that call them."""
    yield name, command
    if isinstance(command, click.Group):
        for each in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), each)
            assert below
            yield from commands(below, f"{name} {each}")


def test_help_explains_each_option_and_ends_with_an_example() -> None:
    """The example parses, and more than 12 options are shown under headings."""
    wrong = []
    for name, command in commands(group, "starpod"):
        options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
        headings = getattr(command, "headings", {})
        prefix, _, example = (command.epilog or "").partition(": ")
        if not all(option.help for option in options) or len(options) - sum(map(len, headings.values())) > 12:
            wrong.append(name)
        if prefix != "Example" or not example.startswith(name):
            wrong.append(f"{name}: {command.epilog}")
        elif not isinstance(command, click.Group):
            parser = command.make_parser(click.Context(command, **command.context_settings))
            parser.parse_args(shlex.split(example)[len(name.split()) :])
    assert wrong == []


@pytest.mark.parametrize("words", [(), ("webshop",), ("--debug",)])
def test_a_group_without_a_command_shows_its_help(words: tuple[str, ...]) -> None:
    result = run_starpod(*words)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("Usage: starpod ") and "\nCommands:\n" in result.err


def test_version() -> None:
    result = run_starpod("--version")
    assert result.status == 0 and result.out.startswith("starpod, version ")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("serv", 2, "did you mean serve"),
        ("list", 2, "ENVIRONMENT"),
        ("list localhost:x", 2, "is no environment: write NAME"),
        ("list http://127.0.0.1:50051/", 2, "write 127.0.0.1:50051$"),
        ("list 127.0.0.1:1", 1, "no server answers at 127.0.0.1:1"),
        ("list nowhere.invalid:1", 1, "there is no host nowhere.invalid$"),
        ("describe SERVER sokobann", 2, r"did you mean sokoban-v1\?"),
        ("describe SERVER sokoban --version 9.9.9", 2, "1.0.0"),
        ("describe SERVER sokoban --version >=2", 2, "no version '>=2' of sokoban-v1"),
        ("describe SERVER sokoban --version ~1", 2, "not a version range"),
        ("play SERVER sokoban --option boxs=2", 2, "did you mean"),
        ("play SERVER sokoban --option boxs=2", 2, "observation: "),
        ("play SERVER frozen_lake --option size=999", 2, "size"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_status(
    server: ServerProcess, words: str, status: int, said: str
) -> None:
    result = run_starpod(*words.replace("SERVER", server.address).split())
    assert result.status == status and re.search(said, result.complaint)


def test_serve_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    result = run_starpod("serve")
    assert result.status == 1 and "from a clone of the repository: pip install '.[server]'" in result.complaint


def test_a_package_that_a_command_imports_late_is_one_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starpod.trainer.commands.jobs", None)  # a module of our own: no extra has it
    assert "pip install" not in run_starpod("train", "--list").complaint
    monkeypatch.delitem(sys.modules, "starpod.trainer.commands.jobs")
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run_starpod("export", str(ROOT), "never")
    assert result.status == 1
    assert (
        "needs the package transformers; from a clone of the repository: pip install '.[trainer]'" in result.complaint
    )


# --- list and describe -------------------------------------------------------------------------------------------


def test_list_shows_what_is_hosted(server: ServerProcess) -> None:
    result = run_starpod("list", server.address)
    assert (result.status, result.err) == (0, "")
    assert all(word in result.out for word in ("Capabilities", "bandit-v1", "sokoban-v1", "frozen_lake-v1"))
    narrow = run_starpod("list", server.address, columns=50).out
    assert "frozen_lake-v1" in narrow and "Capabilities" not in narrow


def test_a_character_that_the_terminal_lacks_ends_nothing(server: ServerProcess) -> None:
    result = run_starpod("describe", server.address, "sokoban", encoding="ascii")
    assert (result.status, result.err) == (0, "") and "\\u221a box on target" in result.out


def test_output_that_cannot_be_written_is_one_line(server: ServerProcess) -> None:
    with open("/dev/full", "w") as full:
        words = [*COMMAND, "describe", server.address, "sokoban"]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=250, cwd=ROOT)
    assert (result.returncode, result.stderr) == (1, "starpod: cannot write or read: No space left on device\n")


@pytest.mark.parametrize("words", [("list",), ("describe", "frozen_lake", "--json")])
def test_a_reader_that_has_gone_ends_it_without_a_word(server: ServerProcess, words: tuple[str, ...]) -> None:
    """`starpod list ADDRESS | head -1` closes the pipe early."""
    command, *more = words
    reader, writer = os.pipe()
    os.close(reader)
    program = [*COMMAND, command, server.address, *more]
    result = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=250)
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_an_error_with_a_sentence_of_its_own_gets_no_other() -> None:
    assert (
        _describe_error(OSError(28, "cannot write the run. Make room")) == "[Errno 28] cannot write the run. Make room"
    )
    assert (
        _describe_error(FileNotFoundError(2, "No such file or directory", "a.txt"))
        == "a.txt: No such file or directory"
    )


def test_list_as_json_is_nothing_but_json(server: ServerProcess) -> None:
    specs = {spec["id"]: spec for spec in json.loads(run_starpod("list", server.address, "--json").out)}
    assert set(specs) >= {"bandit-v1", "countdown-v1", "frozen_lake-v1", "sokoban-v1", "sudoku-v1"}
    assert specs["frozen_lake-v1"]["options_schema"]["properties"]["size"]["default"] == 4


@pytest.mark.parametrize(
    ("word", "id"),
    [
        ("SERVER/bandit", "bandit-v1"),
        ("bandit", "bandit-v1"),
        ("examples/courier.py:courier", "courier-v1"),
        ("gymnasium:CliffWalking-v1", "gymnasium-cliff-walking-v1"),
    ],
)
def test_a_word_names_an_environment_wherever_it_is(server: ServerProcess, word: str, id: str) -> None:
    described = run_starpod("describe", word.replace("SERVER", server.address), "--json")
    assert json.loads(described.out)["id"] == id


def test_describe_shows_actions_options_and_limits(server: ServerProcess) -> None:
    result = run_starpod("describe", server.address, "frozen_lake")
    assert result.status == 0
    for text in ("frozen_lake-v1", "Left, Down, Right, Up", "success_rate", "5 actions a turn"):
        assert text in result.out
    spec = json.loads(run_starpod("describe", server.address, "sokoban-v1", "--json").out)
    assert spec["id"] == "sokoban-v1" and spec["capabilities"]["fork"] is True


def test_the_reason_for_a_failed_connection_is_one_line(server: ServerProcess, tmp_path: Path) -> None:
    """The line contains neither gRPC's message nor its log lines."""
    files = {name: str(file) for name, file in credentials(tmp_path).items()}
    ca, token = ("--ca", files["ca"]), ("--token-file", files["token"])
    assert run_starpod("list", server.address, *ca).complaint.endswith("speaks without TLS: leave --ca out")
    assert "must be PEM files" in run_starpod("list", server.address, "--ca", files["key"]).complaint
    tls = ("--tls-certificate", files["certificate"], "--tls-key", files["key"])
    with start_server("bandit", *tls, *token) as guarded:
        done = subprocess.run([*COMMAND, "list", guarded.address], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == "" and done.stderr.count("\n") == 1
        assert done.stderr.endswith("if it wants TLS, give --ca, and for mTLS --certificate and --key\n")
        refused = run_starpod("list", guarded.address, *ca)
        assert refused.status == 1 and "token" in refused.complaint
        assert "bandit-v1" in run_starpod("list", guarded.address, *ca, *token).out


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1:1", 1), ("localhost", 2)])
def test_debug_shows_the_traceback(address: str, status: int) -> None:
    result = run_starpod("list", address, "--debug")
    assert result.status == status and "Traceback" in result.err


# --- play --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (
            "right\nRight || down\nDOWN\n",
            [
                "Turn 2: Right (+0); Down (+0)",
                "Turn 3: Down (+1)",
                "Solved: the task ended after 3 turns, total reward +1",
            ],
        ),
        (
            "right\ndown\nup\n",
            ["Not solved: the task ended after 2 turns, total reward +0", "episode is over"],
        ),
        ("rihgt\nright\n", ["no action 'rihgt'; did you mean Right?", "Turn 1: Right"]),
        (
            "hint\ndown\nundo\nundo\nup\nagain\nnew\nhelp\nquit\nright\n",
            [
                "The expert would play: ",
                "Took the last turn back.",
                "There is no turn to take back",
                "Turn 1: Up changed nothing",
                "A new episode, seed 3.",
            ],
        ),
    ],
    ids=["goal", "hole", "mistyped", "commands"],
)
def test_play(server: ServerProcess, typed: str, shown: list[str]) -> None:
    lake = ("--seed", "3", "--option", f"map={LAKE}", "--option", "success_rate=1")
    result = run_starpod("play", server.address, "frozen_lake", *lake, stdin=typed)
    assert (result.status, result.err) == (0, "")
    for text in shown:
        assert text in result.out
    assert "quit\n" not in typed or "Turn 1: Right" not in result.out  # nothing is played after quit


def test_a_line_that_is_not_utf_8_is_not_played_in_any_locale(server: ServerProcess) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*COMMAND, "play", server.address, "bandit"],
        input=b"n\xc3\xb6\xff\nn\xc3\xb6\n",
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"is not UTF-8: type it again" in done.stdout
    assert rb"Turn 1: n\xf6 was invalid" in done.stdout


def test_play_with_arrow_keys_on_a_terminal(server: ServerProcess) -> None:
    """Arrow keys act at once; letters wait for Enter; backspace takes them back; Ctrl-D leaves."""
    controller, terminal = pty.openpty()
    command = [*COMMAND, "play", server.address, "frozen_lake", "--option", f"map={LAKE}", "--option", "success_rate=1"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT) as process:
        os.close(terminal)

        def wait_for(text: str) -> None:
            shown = ""
            while text not in shown:
                shown += os.read(controller, 4096).decode(errors="replace")

        wait_for("quit")
        os.write(controller, b"\x1b[C")
        wait_for("Turn 1: ")
        os.write(controller, b"rightx\x7f\r\x1b[B")
        wait_for("Turn 3: ")
        os.write(controller, b"hint\r")
        wait_for("The expert would play")
        os.write(controller, b"\x1b[B")
        wait_for("Solved")
        os.write(controller, b"\x04")
        assert process.wait(120) == 0
    os.close(controller)


def test_undo_brings_the_very_same_state_back(server: ServerProcess) -> None:
    slippery = ("play", server.address, "frozen_lake", "--seed", "5", "--option", "success_rate=0.4")
    straight, detour = (run_starpod(*slippery, stdin=typed).out for typed in ("down\n", "down\nright\nundo\n"))
    assert detour.splitlines()[-1] == "Took the last turn back."
    board = [line for line in straight.splitlines() if line.startswith("│")][-6:]
    assert board == [line for line in detour.splitlines() if line.startswith("│")][-6:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_play_leaves_no_session_however_it_ends(bandit: ServerProcess, number: signal.Signals) -> None:
    def live() -> int:
        with SyncFleet(bandit.address) as fleet:
            description = fleet.replicas[0].description
        return description.live_sessions if description else 0

    command = [*COMMAND, "play", bandit.address, "bandit"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin and process.stdout
        while "quit" not in process.stdout.readline():
            pass
        assert live() == 1
        if number == signal.SIGPIPE:
            process.stdout.close()
            process.stdin.write("new\n" * 9)
            process.stdin.flush()
        else:
            process.send_signal(number)
        assert process.wait(120) != 0
    assert live() == 0


def test_a_server_that_is_killed_during_play_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.remote.catalog.PATIENCE_SECONDS", 1.0)

    class KillsFirst(io.StringIO):
        def readline(self, size: int | None = -1) -> str:
            host.kill()
            return "again\n"

    with start_server("bandit") as host:
        result = run_starpod("play", host.address, "bandit", stdin=KillsFirst())
    assert result.status == 1 and result.err.count("\n") == 1 and "TLS" not in result.err
    assert f"the server at {host.address} ended" in result.err or "connection refused" in result.err


def test_an_action_that_is_no_arm_is_told_to_be_invalid(server: ServerProcess) -> None:
    assert "Turn 1: nonsense was invalid" in run_starpod("play", server.address, "bandit", stdin="nonsense\n").out


def test_a_sigterm_while_process_1_still_imports_its_command_is_not_lost() -> None:
    """The kernel drops it if there is no handler. Elsewhere the default action ends the process."""
    program = (
        "import os, signal; pid = os.getpid(); os.getpid = lambda: 1; import starpod.cli; os.kill(pid, signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 128 + signal.SIGTERM
