"""Small tasks in Harbor's format, and the engine that runs them."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from starpod.env_server.hosting.harbor_task import TaskFolder
from starpod.env_server.machines.engine import LEASE, SERVER, SESSION

BASE = "starpod-base:bookworm"
"""Image that tests use, since none can be pulled everywhere."""
COUNT_SLEEPS = (
    "for i in 1 2 3 4 5 6 7 8 9; do left=$(grep -c sleep /proc/[0-9]*/comm | grep -c ':1'); [ $left = 0 ] && break; "
    "sleep 0.2; done; echo $left"
)
"""Command that prints the number of processes `sleep`. Those that were killed may wait for their parent for a while."""
TEXT_REWARD = '[ "$(cat /app/hello.txt)" = hello ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
JSON_REWARD = """python3 - <<'END'
import json, os
right = os.path.exists("answer.txt") and open("answer.txt").read().strip() == "3"
rewards = {"right": float(right), "written": float(os.path.exists("answer.txt"))}
json.dump(rewards, open("/logs/verifier/reward.json", "w"))
END"""


def write_task(
    folder: Path, *, tests: str, solution: str = "", settings: str = "", dockerfile: str = "", more: str = ""
) -> Path:
    """Write a task folder and return it.

    more: a second file of the solution.
    """
    files = {
        "instruction.md": f"Do {folder.name}.\n",
        "task.toml": f'schema_version = "1.4"\n{settings}',
        "environment/Dockerfile": f"# {os.getpid()}: no other's image\nFROM {BASE}\nWORKDIR /app\n{dockerfile}",
        "tests/test.sh": f"#!/bin/bash\n{tests}\n",
    }
    if solution:
        files["solution/solve.sh"] = f"#!/bin/bash\n{solution}\n"
    if more:
        files["solution/more.txt"] = more
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_tasks(folder: Path) -> Path:
    """Write the tasks `hello`, `count` and `files`, and return their folder."""
    write_task(
        folder / "hello",
        tests=TEXT_REWARD,
        solution="echo hello > hello.txt",
        settings="[environment]\nmemory_mb = 128\nstorage_mb = 64\n",
    )
    write_task(
        folder / "count",
        tests=JSON_REWARD,
        solution="set -e\ngrep -c ERROR log.txt > answer.txt\nexit 0",
        dockerfile="RUN printf 'ERROR\\nok\\nERROR\\nok\\nERROR\\n' > log.txt\n",
    )
    write_task(
        folder / "files",
        tests=TEXT_REWARD,
        solution='cp "$(dirname "$0")/more.txt" hello.txt',
        more="hello",
    )
    return folder


LEFTOVERS = [
    ("here, ended", "used", 1000, False),
    ("elsewhere", "used", -1, False),
    ("elsewhere", "unknown", 1000, True),
    ("here", "used", 1000, True),
    ("here", "ended", 1000, False),
]
"""Place of the server, session, seconds of the lease, and whether a sweep by a server "here" leaves the machine."""


def leftover_labels(own_server: str, place: str, session: str, seconds: int) -> dict[str, str]:
    """Return the labels of a machine of one of LEFTOVERS."""
    boot, namespace, process_id, begin = own_server.split("/")
    servers = {"here": own_server, "elsewhere": f"other/{namespace}/{process_id}/{begin}"}
    servers["here, ended"] = f"{boot}/{namespace}/{process_id}/{int(begin) + 1}"
    return {SERVER: servers[place], SESSION: session, LEASE: str(int(time.time()) + seconds)}


@functools.cache
def missing() -> str:
    """Return why no machines can run here, or an empty text."""
    try:
        from starpod.env_server.authoring.environment import Unavailable
        from starpod.env_server.machines.docker_engine import connect
    except ModuleNotFoundError as error:
        return f"there is no package {error.name} here"
    try:
        return "" if connect().find_image(BASE) else f"the engine has no image {BASE}"
    except Unavailable as error:
        return str(error)


def remove_image(engine: Any, task: Path) -> None:
    """Remove the image that was built for a task, as soon as no container uses it."""
    from docker.errors import APIError, NotFound

    for _ in range(50):
        try:
            engine.api.remove_image(TaskFolder.read(task).image, force=True)
        except NotFound:
            return
        except APIError:
            time.sleep(0.2)
