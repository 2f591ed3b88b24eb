"""examples/scripted_policy.py plays a server's environments with both policies."""

import subprocess
import sys

from tests.support import ROOT, start_server


def test_the_expert_solves_what_it_plays() -> None:
    with start_server("bandit", "sokoban") as server:
        command = [sys.executable, str(ROOT / "examples/scripted_policy.py"), server.address]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = ["bandit-v1 expert", "bandit-v1 random", "sokoban-v1 expert", "sokoban-v1 random"]
    assert [line.partition(":")[0] for line in output.splitlines()] == names
    assert [": 100% solved" in line for line in output.splitlines()] == [True, False, True, False], output
