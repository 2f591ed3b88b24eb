"""Costs of a task in a container: boot, step, snapshot, fork and memory, beside other ways to run its commands.

    python -m benchmarks.serving.machines --base debian:bookworm-slim [--rounds 5] [--openenv] [--harbor PYTHON]

The other ways are `docker exec` with a process per command, OpenEnv's container provider with a server inside the
container (--openenv: needs `.venv-bench` and a base image with pip), and Harbor's Docker environment (--harbor: a
Python with harbor 0.26, which needs Docker's compose plugin). All start from an image that is there. The ways take
turns, and figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import descendants, resident_bytes
from benchmarks.results import Columns, cells_of, duration, print_table, write_result
from benchmarks.serving.machine_faults import connect
from starpod.client import SyncFleet
from starpod.env_server.hosting.harbor_task import TaskFolder
from starpod.env_server.machines.engine import MEBIBYTE
from tests.env_server.machines.tasks import write_task
from tests.support import ROOT, start_server

STEPS = 20
IDLE = 8
"""Sessions of which the memory is measured."""
Samples = defaultdict[str, list[float]]
OPENENV = """
import subprocess
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class ShellAction(Action):
    command: str
class ShellObservation(Observation):
    text: str
class Shell(Environment):
    state = State()
    def reset(self, seed=None, episode_id=None, **options):
        return ShellObservation(text="")
    def step(self, action, timeout_s=None, **options):
        done = subprocess.run(["bash", "-c", action.command], capture_output=True, text=True)
        return ShellObservation(text=done.stdout)
app = create_app(Shell, ShellAction, ShellObservation, env_name="shell")
"""
HARBOR = """
import asyncio, json, sys, tempfile, time
from pathlib import Path
from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
async def main(folder, name, steps, image):
    with tempfile.TemporaryDirectory() as trial:
        paths = TrialPaths(trial_dir=Path(trial))
        paths.mkdir()
        environment = DockerEnvironment(Path(folder), name, name, paths, EnvironmentConfig(docker_image=image))
        times = [time.perf_counter()]
        await environment.start(force_build=False)
        times.append(time.perf_counter())
        for _ in range(int(steps)):
            assert (await environment.exec("true")).return_code == 0
            times.append(time.perf_counter())
        await environment.stop(delete=True)
    print(json.dumps([after - before for before, after in zip(times, times[1:])]))
asyncio.run(main(*sys.argv[1:]))
"""
Way = Callable[[Samples], None]


@contextlib.contextmanager
def timed(samples: Samples, what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    samples[what].append(time.perf_counter() - start)


def container_bytes(api: Any, name: str) -> list[int]:
    """Return the memory of each container whose name contains `name`, without its page cache."""
    sizes = []
    for container in api.containers(filters={"name": name}):
        memory = api.stats(container["Id"], stream=False)["memory_stats"]
        cache = memory["stats"].get("total_inactive_file", memory["stats"].get("inactive_file", 0))
        sizes.append(memory["usage"] - cache)
    return sizes


class Starpod:
    """A server of the same task four times: cold, warm, with copies, and for the sessions that stay idle."""

    def __init__(self, address: str, pid: int, api: Any, prefix: str) -> None:
        self.fleet = SyncFleet(address, checkpoints=False)
        self._pid, self._api, self._prefix = pid, api, prefix

    def play(self, samples: Samples, kind: str) -> None:
        """Open a session, cold or warm, and play it."""
        name = f"{self._prefix}-{kind}-v1"
        if kind == "warm":
            self.fleet.open(name)[0].close()
            while len(self._api.containers(filters={"name": name})) != 1:
                time.sleep(0.2)
            time.sleep(3.0)  # its shell is not ready as soon as the container runs
        with timed(samples, "boot"):
            (session,) = self.fleet.open(name)
        for _ in range(STEPS):
            with timed(samples, "step"):
                session.step("true")
        session.close()

    def copies(self, samples: Samples) -> None:
        (session,) = self.fleet.open(f"{self._prefix}-copies-v1")
        session.step("echo hello > hello.txt")
        with timed(samples, "snapshot"):
            session.snapshot()
        with timed(samples, "fork"):
            (copy,) = session.fork()
        copy.close()
        session.close()

    def idle(self, samples: Samples) -> None:
        before = self._server_bytes()
        sessions = self.fleet.open(f"{self._prefix}-idle-v1", count=IDLE)
        for session in sessions:
            session.step("true")
        samples["server"].append((self._server_bytes() - before) / IDLE)
        samples["container"] += container_bytes(self._api, f"{self._prefix}-idle")
        self.fleet.close_sessions(sessions)

    def _server_bytes(self) -> int:
        return sum(map(resident_bytes, [self._pid, *descendants(self._pid)]))


def docker_exec(samples: Samples, base: str, api: Any) -> None:
    name = f"machines-{os.getpid()}-exec"
    run = [
        "docker",
        "run",
        "--detach",
        "--rm",
        "--init",
        "--network",
        "none",
        "--name",
        name,
        base,
        "sleep",
        "infinity",
    ]
    with timed(samples, "boot"):
        subprocess.run(run, check=True, capture_output=True)
    for _ in range(STEPS):
        with timed(samples, "step"):
            subprocess.run(["docker", "exec", name, "bash", "-c", "true"], check=True, capture_output=True)
    samples["container"] += container_bytes(api, name)
    subprocess.run(["docker", "rm", "--force", name], check=True, capture_output=True)


def openenv(samples: Samples, image: str, api: Any) -> None:
    from openenv.core.generic_client import GenericEnvClient

    with timed(samples, "boot"):
        client = GenericEnvClient.from_docker_image(image).sync()
        client.reset()
    for _ in range(STEPS):
        with timed(samples, "step"):
            client.step({"command": "true"})
    samples["container"] += container_bytes(api, image)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it gives the engine 10 s
        client.close()
    for container in api.containers(all=True, filters={"name": image}):
        api.remove_container(container["Id"], force=True)


def build_openenv(base: str, folder: Path) -> str:
    """Build an image with OpenEnv's server and return its name."""
    folder.mkdir()
    (folder / "shell.py").write_text(OPENENV)
    lines = [f"FROM {base}", "RUN pip install --quiet --break-system-packages openenv", "COPY shell.py /", "WORKDIR /"]
    lines.append('CMD ["python3", "-m", "uvicorn", "shell:app", "--host", "0.0.0.0", "--port", "8000"]')
    (folder / "Dockerfile").write_text("\n".join(lines))
    name = f"machines-openenv-{os.getpid()}"
    subprocess.run(["docker", "build", "--quiet", "--network", "host", "--tag", name, folder], check=True)
    return name


def harbor(samples: Samples, python: str, folder: Path, base: str) -> None:
    words = [python, "-c", HARBOR, str(folder), f"machines-{os.getpid()}", str(STEPS), base]
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    boot, *steps = json.loads(output.splitlines()[-1])
    samples["boot"].append(boot)
    samples["step"] += steps


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure every way in turn in each round, and return the medians of each way."""
    api, prefix = connect(os.environ["DOCKER_HOST"]), f"machines-{os.getpid()}"
    task = write_task(folder / "task", tests="echo 1 > /logs/verifier/reward.txt")
    (task / "environment/Dockerfile").write_text(f"FROM {arguments.base}\nWORKDIR /app\n")
    settings = {"cold": "warm=0", "warm": "warm=1", "copies": "warm=0&copies=yes", "idle": "warm=0"}
    words = [f"harbor:{task}#id={prefix}-{name}-v1&{setting}" for name, setting in settings.items()]
    image = build_openenv(arguments.base, folder / "openenv") if arguments.openenv else ""
    samples: defaultdict[str, Samples] = defaultdict(lambda: defaultdict(list))
    try:
        with start_server(*words) as server:
            starpod = Starpod(server.address, server.pid, api, prefix)
            ways: dict[str, Way] = {
                "Starpod": partial(starpod.play, kind="cold"),
                "Starpod, warm": partial(starpod.play, kind="warm"),
            }
            ways["docker exec"] = partial(docker_exec, base=arguments.base, api=api)
            if image:
                ways["OpenEnv"] = partial(openenv, image=image, api=api)
            if arguments.harbor:
                empty = folder / "empty"
                empty.mkdir()
                ways["Harbor"] = partial(harbor, python=arguments.harbor, folder=empty, base=arguments.base)
            starpod.play(Samples(list), "cold")
            for _ in range(arguments.rounds):
                for name, way in ways.items():
                    way(samples[name])
                starpod.copies(samples["Starpod"])
                starpod.idle(samples["Starpod"])
            starpod.fleet.close()
    finally:
        for name in filter(None, [image, TaskFolder.read(task).image]):
            api.remove_image(name, force=True)
    return [{"way": way, **{what: median(v) for what, v in values.items()}} for way, values in samples.items()]


def cell(result: Mapping[str, Any], what: str) -> str:
    return duration(result[what]) if what in result else ""


COLUMNS: Columns = {
    "A container for each session": lambda row: row["way"],
    "Boot": lambda row: cell(row, "boot"),
    "Step (`true`)": lambda row: cell(row, "step"),
    "Snapshot": lambda row: cell(row, "snapshot"),
    "Fork": lambda row: cell(row, "fork"),
    "Memory of the container": lambda row: f"{row['container'] / MEBIBYTE:.1f} MiB" if "container" in row else "",
    "Of the server": lambda row: f"{row['server'] / MEBIBYTE:.2f} MiB" if "server" in row else "",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="image of the containers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openenv", action="store_true", help="measure OpenEnv, too")
    parser.add_argument("--harbor", default="", metavar="PYTHON", help="measure Harbor, too: Python that has it")
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/machines.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(arguments, Path(folder))
    print_table(list(COLUMNS), cells_of(results, COLUMNS))
    write_result(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
