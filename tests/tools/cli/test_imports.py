"""What the command line loads before a subcommand is chosen."""

import json
import os
import subprocess
import sys

from starpod.cli.polling import VARIABLE

PROGRAM = """
import json, os, sys
import starpod.cli.main as cli
loaded = [name for name in ("grpc", "torch", "starpod.client", "starpod.v1") if name in sys.modules]
cli.prefer_poller()
import starpod.client
print(json.dumps([loaded, "grpc" in sys.modules, os.environ.get(%r)]))
"""


def test_the_command_line_loads_no_grpc_before_it_has_chosen_how_grpc_polls() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM % VARIABLE], env=environment, capture_output=True, text=True, check=True
    ).stdout
    loaded, grpc, setting = json.loads(output)
    assert loaded == []
    assert grpc and setting
