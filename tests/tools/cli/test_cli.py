"""The command line as a person meets it: real processes against real servers."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from starpod.cli.game import Game
from starpod.cli.main import SUBCOMMANDS, _sentence
from starpod.cli.main import starpod as group
from starpod.client.catalog import connect, find_environment, hosted
from tests.support import ROOT, ServerProcess, start_server

LAKE = '["SFF", "FHF", "FFG"]'


def starpod(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "starpod.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error of a failed call that printed nothing else."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("starpod: ")
    return line


# --- the frame ---------------------------------------------------------------------------------------------------


def test_help_lists_every_subcommand() -> None:
    result = starpod("--help")
    assert result.returncode == 0
    assert all(f"  {name} " in result.stdout for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_has_help(name: str) -> None:
    result = starpod(name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: starpod {name} ")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("eval --help", 0),
        ("vllm --help", 0),
        ("eval bandit nowhere", 2),
        ("train nothing", 2),
        ("train bandit lr=1", 2),
    ],
)
def test_help_and_mistakes_do_not_wait_for_torch(words: str, status: int) -> None:
    """Loading torch takes seconds."""
    program = (
        "import sys\nfrom starpod.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print(end.code or 0, {'torch', 'transformers'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == f"{status} set()", done.stderr


def test_every_option_says_what_it_does() -> None:
    def silent(command: click.Command, name: str) -> list[str]:
        if isinstance(command, click.Group):
            below = {
                each: command.get_command(click.Context(command), each)
                for each in command.list_commands(click.Context(command))
            }
            return [option for each, found in below.items() if found for option in silent(found, f"{name} {each}")]
        options = (option for option in command.params if isinstance(option, click.Option))
        return [f"{name} {option.opts[0]}" for option in options if not option.help]

    assert silent(group, "starpod") == []


@pytest.mark.parametrize("words", [(), ("webshop",), ("--debug",)])
def test_a_group_without_a_command_shows_its_help(words: tuple[str, ...]) -> None:
    result = starpod(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: starpod ")
    assert "\nCommands:\n" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        # gRPC only after its poller is chosen
        "assert not any(module.startswith('grpc') for module in sys.modules)",
        # no server package for commands of the client
        "for name in ('list', 'describe', 'play'): main.SUBCOMMANDS[name].load()\n"
        "assert not any(module.startswith('starpod.env_server') or module == 'pydantic' for module in sys.modules)",
        # torch only where a configuration is read
        "from click.testing import CliRunner\n"
        "for words in (['--list'], ['--nothing']):\n"
        "    CliRunner().invoke(main.SUBCOMMANDS['train'].load(), words)\n"
        "assert 'torch' not in sys.modules",
    ],
)
def test_what_a_command_does_not_need_is_not_imported(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys, starpod.cli.main as main\n{code}"], check=True, cwd=ROOT)


def test_version() -> None:
    result = starpod("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("starpod, version ")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("serv", 2, "did you mean serve"),
        ("list", 2, "ADDRESS"),
        ("list localhost", 2, "host:port"),
        ("list http://127.0.0.1:50051/", 2, "write 127.0.0.1:50051$"),
        ("list 127.0.0.1:1", 1, "no server answers at 127.0.0.1:1"),
        ("list nowhere.invalid:1", 1, "there is no host nowhere.invalid$"),
        ("describe SERVER sokobann", 2, r"did you mean sokoban-v1\?"),
        ("describe SERVER sokoban --version 9.9.9", 2, "1.0.0"),
        ("play SERVER sokoban --option boxs=2", 2, "did you mean"),
        ("play SERVER sokoban --option boxs=2", 2, "observation: "),
        ("play SERVER frozen_lake --option size=999", 2, "size"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_status(
    server: ServerProcess, words: str, status: int, said: str
) -> None:
    result = starpod(*words.replace("SERVER", server.address).split())
    assert result.returncode == status
    assert re.search(said, complaint(result))


def test_serve_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')")
    result = subprocess.run(
        [sys.executable, "-m", "starpod.cli.main", "serve"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 1
    assert "from a clone of the repository: pip install '.[server]'" in complaint(result)


# --- list and describe -------------------------------------------------------------------------------------------


def test_list_shows_what_is_hosted(server: ServerProcess) -> None:
    result = starpod("list", server.address)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(word in result.stdout for word in ("Capabilities", "bandit-v1", "sokoban-v1", "frozen_lake-v1"))


def test_list_on_a_narrow_terminal_shows_whole_names(server: ServerProcess) -> None:
    shown = starpod("list", server.address, COLUMNS="50").stdout
    assert "frozen_lake-v1" in shown
    assert "Capabilities" not in shown


def test_a_character_that_the_terminal_lacks_ends_nothing(server: ServerProcess) -> None:
    result = starpod("describe", server.address, "sokoban", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\\u221a box on target" in result.stdout


def test_output_that_cannot_be_written_is_one_line(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "describe", server.address, "sokoban"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == "starpod: cannot write or read: No space left on device\n"


@pytest.mark.parametrize("words", [("list",), ("describe", "frozen_lake"), ("describe", "frozen_lake", "--json")])
def test_a_reader_that_has_gone_ends_it_without_a_word(server: ServerProcess, words: tuple[str, ...]) -> None:
    """As `starpod list ADDRESS | head -1` does."""
    command, *more = words
    program = [sys.executable, "-m", "starpod.cli.main", command, server.address, *more]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_an_error_with_a_sentence_of_its_own_gets_no_other() -> None:
    assert _sentence(OSError(28, "cannot write the run. Make room")) == "[Errno 28] cannot write the run. Make room"
    assert _sentence(FileNotFoundError(2, "No such file or directory", "a.txt")) == "a.txt: No such file or directory"


def test_list_as_json_is_nothing_but_json(server: ServerProcess) -> None:
    result = starpod("list", server.address, "--json")
    specs = {spec["id"]: spec for spec in json.loads(result.stdout)}
    assert set(specs) >= {"bandit-v1", "countdown-v1", "frozen_lake-v1", "sokoban-v1", "sudoku-v1"}
    assert specs["frozen_lake-v1"]["options_schema"]["properties"]["size"]["default"] == 4


def test_describe_shows_actions_options_and_limits(server: ServerProcess) -> None:
    result = starpod("describe", server.address, "frozen_lake")
    assert result.returncode == 0
    for text in ("frozen_lake-v1", "Left, Down, Right, Up", "success_rate", "5 actions a turn"):
        assert text in result.stdout


def test_describe_as_json(server: ServerProcess) -> None:
    result = starpod("describe", server.address, "sokoban-v1", "--json")
    spec = json.loads(result.stdout)
    assert spec["id"] == "sokoban-v1"
    assert spec["capabilities"]["fork"] is True


def test_why_there_is_no_connection_is_told_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    """Not gRPC's words, and none of its log lines."""
    key, certificate = (str(tmp_path / name) for name in ("key.pem", "certificate.pem"))
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", key]
    subprocess.run([*make, "-out", certificate], check=True, capture_output=True)
    without_tls = starpod("list", server.address, "--ca", certificate)
    assert without_tls.returncode == 1
    assert complaint(without_tls).endswith("speaks without TLS: leave --ca out")
    no_certificate = starpod("list", server.address, "--ca", key)
    assert no_certificate.returncode == 2
    assert "must be PEM files" in complaint(no_certificate)
    with start_server("bandit", "--tls-certificate", certificate, "--tls-key", key) as guarded:
        assert complaint(starpod("list", guarded.address)).endswith(
            "if it wants TLS, give --ca, and for mTLS --certificate and --key"
        )


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1:1", 1), ("localhost", 2)])
def test_debug_shows_the_traceback(address: str, status: int) -> None:
    result = starpod("list", address, "--debug")
    assert result.returncode == status
    assert "Traceback" in result.stderr


def test_a_token_is_asked_for_and_taken(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-of-this-test\n")
    with start_server("bandit", "--token-file", str(token)) as guarded:
        refused = starpod("list", guarded.address)
        assert refused.returncode == 1
        assert "token" in complaint(refused)
        assert "bandit-v1" in starpod("list", guarded.address, "--token-file", str(token)).stdout


# --- play --------------------------------------------------------------------------------------------------------


def play_lake(server: ServerProcess, stdin: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    lake = ("--option", f"map={LAKE}", "--option", "success_rate=1")
    return starpod("play", server.address, "frozen_lake", "--seed", "3", *lake, *arguments, stdin=stdin)


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
            ["Not solved: the task ended after 2 turns, total reward +0", "the episode is over"],
        ),
        ("rihgt\nright\n", ["no action 'rihgt'; did you mean Right?", "Turn 1: Right"]),
        (
            "hint\ndown\nundo\nundo\nup\nagain\nnew\nhelp\nquit\nright\n",
            [
                "The expert would play: ",
                "Took the last turn back.",
                "there is no turn to take back",
                "Turn 1: Up changed nothing",
                "A new episode, seed 3.",
            ],
        ),
    ],
    ids=["goal", "hole", "mistyped", "commands"],
)
def test_play(server: ServerProcess, typed: str, shown: list[str]) -> None:
    result = play_lake(server, typed)
    assert (result.returncode, result.stderr) == (0, "")
    for text in shown:
        assert text in result.stdout
    assert "quit\n" not in typed or "Turn 1: Right" not in result.stdout  # nothing is played after quit


def test_play_with_arrow_keys_on_a_terminal(server: ServerProcess) -> None:
    """Arrow keys act at once; letters wait for Enter; backspace takes them back; Ctrl-D leaves."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "starpod.cli.main", "play", server.address, "frozen_lake"]
    command += ["--option", f"map={LAKE}", "--option", "success_rate=1"]
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
        assert process.wait(30) == 0
    os.close(controller)


def test_undo_brings_the_very_same_state_back(server: ServerProcess) -> None:
    slippery = ("play", server.address, "frozen_lake", "--seed", "5", "--option", "success_rate=0.4")
    straight = starpod(*slippery, stdin="down\n").stdout
    detour = starpod(*slippery, stdin="down\nright\nundo\n").stdout
    assert detour.splitlines()[-1] == "Took the last turn back."
    board = [line for line in straight.splitlines() if line.startswith("│")][-6:]
    assert board == [line for line in detour.splitlines() if line.startswith("│")][-6:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_play_leaves_no_session_however_it_ends(number: signal.Signals) -> None:
    def live(address: str) -> int:
        with connect(address) as connection:
            return hosted(connection).live_sessions

    with start_server("bandit") as host:
        command = [sys.executable, "-m", "starpod.cli.main", "play", host.address, "bandit"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdin and process.stdout
            while "quit" not in process.stdout.readline():
                pass
            assert live(host.address) == 1
            if number == signal.SIGPIPE:
                process.stdout.close()
                process.stdin.write("new\n" * 9)
                process.stdin.flush()
            else:
                process.send_signal(number)
            assert process.wait(30) != 0
        assert live(host.address) == 0


def test_a_server_that_is_killed_during_play_is_one_line() -> None:
    with start_server("bandit") as host:
        command = [sys.executable, "-m", "starpod.cli.main", "play", host.address, "bandit"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
            assert process.stdin and process.stdout and process.stderr
            while "quit" not in process.stdout.readline():
                pass
            host.kill()
            process.stdin.write("again\n")
            process.stdin.close()
            assert process.wait(30) == 1
            told = process.stderr.read()
    assert told.count("\n") == 1 and "TLS" not in told
    assert f"the server at {host.address} ended" in told or "connection refused" in told


def test_an_action_that_is_no_arm_is_told_to_be_invalid(server: ServerProcess) -> None:
    assert "Turn 1: nonsense was invalid" in starpod("play", server.address, "bandit", stdin="nonsense\n").stdout


@pytest.mark.parametrize(
    "environment",
    [
        "bandit",
        "coding",
        "countdown",
        "desk",
        "frozen_lake",
        "house",
        "rubiks_cube",
        "search_qa",
        "sokoban",
        "sudoku",
        "tic_tac_toe",
        "word_problems",
    ],
)
def test_every_environment_is_played_to_its_end_by_its_hints(server: ServerProcess, environment: str) -> None:
    with connect(server.address) as connection:
        spec = find_environment(hosted(connection), environment)
        with Game(connection, spec, {}, seed=1) as game:
            while not game.over:
                game.play(game.parse(game.hint()))
                assert game.picture()
                assert len(game.turns) <= 100
            assert game.transition is not None
            assert game.transition.HasField("success")
