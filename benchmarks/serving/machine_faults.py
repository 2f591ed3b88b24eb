"""Random faults of tasks in containers: engine, containers, server, disk, processes, verifiers and images.

    python -m benchmarks.serving.machine_faults --base debian:bookworm-slim [--faults 500] [--seed 0] [--json FILE]

Each command of an episode adds a line to a file and shows the number of lines, so that a command that runs twice, or
not at all, is seen. All episodes are solved, so that every reward but 1 is false. Deterministic sessions must be
replayed if a fault ends them. The faults hit a second Docker engine, which this program starts as root with a small
disk; --shared-engine uses the engine of DOCKER_HOST instead, without the faults of engines and disks. The base
image needs sort. The exit status is 1 if a rule was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import Columns, cells_of, print_table, write_result
from starpod.client import EnvironmentBug, Fleet, Overloaded, SessionLost, Unreachable
from starpod.env_server.hosting.harbor_task import TaskFolder
from starpod.env_server.machines.engine import MEBIBYTE
from tests.env_server.machines.tasks import write_task
from tests.support import ROOT, ServerProcess

LEFT_SECONDS = 35.0
"""Seconds after which no container may be left: a sweep of the server, and a little more."""
STUCK_SECONDS = 400.0
BATCH = 12
"""Sessions that are played at a time."""
FREE_MB = 500
"""Space on the second engine's disk."""
PARTS = "[environment]\nmemory_mb = 256\nstorage_mb = 64\n[verifier]\ntimeout_sec = {}\n"
BOMB = "bomb() { bomb | bomb & }; bomb"
DEAF = "trap '' TERM INT HUP QUIT; while :; do sleep 1; done"
FILL = "n=0; while head -c 60M /dev/zero > /app/big$n; do n=$((n+1)); done"
SOLVED = "echo 1 > /logs/verifier/reward.txt"
VERIFIERS = {
    "work": (SOLVED, 60.0),
    "hang": (DEAF, 2.0),
    "loud": (f"head -c 1G /dev/zero; {SOLVED}", 300.0),
    "large": ("head -c 1G /dev/zero > /logs/verifier/reward.txt", 60.0),
    "gone": (SOLVED, 60.0),
}
"""Script and time limit of each task's verifier."""
COMMAND = "echo {} >> /app/lines; sleep 0.2; wc -l < /app/lines; sort /app/lines | uniq -d | wc -l"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    weight: int
    """Percentage of all faults."""
    outcomes: str
    """Correct outcomes of the sessions that it hits."""
    task: str = "work"
    commands: tuple[str, ...] = ()
    """Commands of which one is drawn as the fault. After the last one, the episode ends."""


KINDS = {
    "engine restarted": Kind(2, "solved recovered lost"),
    "disk full": Kind(2, "solved recovered lost internal", commands=(f"{FILL}; rm -f /app/big*", FILL)),
    "server killed": Kind(2, "solved recovered lost"),
    "many sessions at once": Kind(1, "solved"),
    "container killed": Kind(47, "solved recovered lost"),
    "fork bomb": Kind(
        8, "solved", commands=(f"{BOMB} 2>/dev/null; sleep 100", f"(setsid sh -c '{BOMB}' >/dev/null 2>&1 &); sleep 1")
    ),
    "process ignores signals": Kind(
        12, "solved", commands=(DEAF, f'(setsid sh -c "{DEAF}" >/dev/null 2>&1 &); sleep 100')
    ),
    "verifier hangs": Kind(10, "internal", "hang"),
    "verifier prints 1 GB": Kind(2, "solved", "loud"),
    "verifier writes 1 GB": Kind(6, "internal lost", "large"),
    "image missing": Kind(8, "internal", "gone"),
}
OWN_ENGINE, FOR_ALL = list(KINDS)[:2], list(KINDS)[:4]
"""Kinds that need the second engine, and those that hit all sessions at a time."""


def connect(address: str) -> Any:
    """Return the client of an engine's API."""
    from docker import DockerClient

    return DockerClient(address, timeout=120).api


class OwnEngine:
    """A Docker engine in a temporary folder and on its own disk, with the base image of another engine."""

    def __init__(self, base: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="starpod-engine-"))
        self.address = f"unix://{self._folder}/socket"
        disk, data = self._folder / "disk", self._folder / "data-root"
        data.mkdir()
        for command in (f"truncate -s 12G {disk}", f"mkfs.ext4 -q {disk}", f"mount -o loop {disk} {data}"):
            subprocess.run(command.split(), check=True)
        self._containerd = self._run(
            *("containerd", "--address", self._folder / "containerd"),
            *("--root", self._folder / "root", "--state", self._folder / "state"),
        )
        self._start(random.Random(0))
        with subprocess.Popen(["docker", "save", base], stdout=subprocess.PIPE) as source:
            subprocess.run(["docker", "-H", self.address, "load", "-q"], stdin=source.stdout, check=True)
        ballast = shutil.disk_usage(data).free - FREE_MB * MEBIBYTE
        subprocess.run(["fallocate", "-l", str(ballast), data / "ballast"], check=True)

    def _run(self, *command: str | Path) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _start(self, rng: random.Random) -> None:
        words = ["--bridge=none", "--iptables=false", "--ip6tables=false", *["--live-restore"] * rng.randrange(2)]
        paths = [f"--{name}={self._folder / name}" for name in ("containerd", "pidfile", "exec-root", "data-root")]
        # In its own network namespace, since an engine without a bridge removes docker0, which others use.
        self._engine = self._run("unshare", "--net", "dockerd", "--host", self.address, *words, *paths)
        for _ in range(600):
            with suppress(Exception):
                connect(self.address).ping()
                return
            time.sleep(0.1)
        problem = (self._folder / "log").read_text()[-500:]
        raise RuntimeError(f"the second Docker engine does not start; use --shared-engine: {problem}")

    def restart(self, rng: random.Random) -> None:
        """Restart the engine, half of the times after SIGKILL, and half with containers that keep running."""
        self._engine.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        self._engine.wait()
        (self._folder / "pidfile").unlink(missing_ok=True)
        self._start(rng)

    def close(self) -> None:
        api = connect(self.address)
        for container in api.containers(all=True):
            with suppress(Exception):
                api.remove_container(container["Id"], force=True)
        for process in (self._engine, self._containerd):
            process.terminate()
            process.wait()
        subprocess.run(["umount", "--lazy", self._folder / "data-root"], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class Tally:
    """Number of faults of one kind, and of their outcomes and broken rules."""

    faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)


class Faults:
    """Episodes among faults, on one server of an engine."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, engine: OwnEngine | None) -> None:
        self.rng, self.crowd = random.Random(arguments.seed), arguments.crowd
        self.engine = engine
        self._folder = folder
        self.prefix = f"faults-{os.getpid()}"
        address = engine.address if engine else os.environ["DOCKER_HOST"]
        self.api = connect(address)
        self.tallies = {kind: Tally() for kind in KINDS}
        settings = "command_seconds=4&max_turns=20"
        words = [f"harbor:{folder}/{name}#{settings}&id={self.prefix}-{name}-v1" for name in VERIFIERS]
        words.append(f"harbor:{folder}/work#{settings}&id={self.prefix}-again-v1&deterministic=yes")
        command = [sys.executable, "-m", "starpod.cli.main", "serve", "--max-containers", str(self.crowd + BATCH)]
        self.server = ServerProcess([*command, *words], {"DOCKER_HOST": address})

    def close(self) -> None:
        self.server.close()
        for task in VERIFIERS:
            self.remove_image(task)

    async def wait_until_few(self, most: int) -> int:
        """Wait until there are at most `most` containers, or too long. Return how many are too many."""
        end = time.monotonic() + LEFT_SECONDS
        while True:
            left = await asyncio.to_thread(self.api.containers, all=True, filters={"name": self.prefix})
            if len(left) <= most or time.monotonic() > end:
                break
            await asyncio.sleep(0.5)
        if len(left) > most:
            print("BROKEN: left:", [(container["Names"][0], container["Status"]) for container in left], flush=True)
        return max(len(left) - most, 0)

    async def play(self, fleet: Fleet, name: str, hit: asyncio.Event | None = None) -> None:
        """Play an episode with a fault of its own, or with one for all, which begins when `hit` is set."""
        kind, tally = KINDS[name], self.tallies[name]
        again = kind.task == "work" and not kind.commands and self.rng.random() < 0.5
        broken: list[str] = []
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                outcome = await self.episode(fleet, name, again, broken, hit)
        except TimeoutError:
            outcome = "stuck"
        except SessionLost as error:
            outcome = "lost"
            if again:
                broken.append(f"lost, although it can be replayed: {error}")
        except EnvironmentBug:
            outcome = "internal"
        except (Overloaded, Unreachable) as error:
            outcome = type(error).__name__.lower()
        except Exception as error:  # any other one is a broken rule
            outcome = repr(error)[:200]
        if outcome not in kind.outcomes.split():
            broken.append(f"outcome: {outcome}")
        tally.outcomes[outcome] += 1
        tally.broken.update(broken)
        for problem in broken:
            print(f"BROKEN: {name}{', deterministic' * again}: {problem}", flush=True)

    async def episode(self, fleet: Fleet, name: str, again: bool, broken: list[str], hit: asyncio.Event | None) -> str:
        kind, rng = KINDS[name], self.rng
        (session,) = await fleet.open(f"{self.prefix}-{'again' if again else kind.task}-v1")
        turns, container, unseen = rng.randrange(2, 5), "", 0
        at = rng.randrange(1, turns)
        deaths: asyncio.Task[None] | None = None
        for turn in range(turns):
            if turn == at - 1 and hit:
                hit.set()
            if turn == at and kind.commands:
                command = rng.choice(kind.commands)
                await session.step(command)
                if command == kind.commands[-1]:
                    break
            if turn == at and name == "container killed":
                deaths = asyncio.create_task(asyncio.to_thread(self.kill, container, rng.uniform(0, 0.4)))
            reply = await session.step(COMMAND.format(rng.getrandbits(64)))
            container, text = reply.info.get("container", container), reply.observation.text
            lines, twice = [*text.split(), "", ""][:2]
            if "took longer" in text:  # a slow machine: it may have run
                unseen += 1
            elif not (name == "disk full" and turn >= at - 1) and not (
                lines.isdecimal() and turn + 1 - unseen <= int(lines) <= turn + 1 and twice == "0"
            ):
                broken.append(f"ran twice or never: turn {turn + 1} shows {text[:200]!r}")
        if deaths and rng.random() < 0.5:
            await deaths
        last = await session.step("done")
        if last.reward != 1.0:
            broken.append(f"a false reward of {last.reward}")
        return "recovered" if session.recoveries else "solved"

    def kill(self, container: str, delay: float) -> None:
        """End a container in one of four ways, as its engine, as another client or as the kernel would."""
        time.sleep(delay)
        with suppress(Exception):
            state = self.api.inspect_container(container)
            shims = subprocess.run(["pgrep", "-f", f"shim.*{state['Id']}"], capture_output=True, text=True).stdout
            way = self.rng.choice(["kill", "remove", "first process", "shim"])
            if way == "kill":
                self.api.kill(container)
            elif way == "remove":
                self.api.remove_container(container, force=True)
            else:
                for pid in [state["State"]["Pid"]] if way == "first process" else map(int, shims.split()):
                    os.kill(pid, signal.SIGKILL)

    async def play_for_all(self, fleet: Fleet, name: str) -> None:
        """Play episodes at a time, and restart the engine or the server when one of them has begun."""
        hit, size = asyncio.Event(), self.crowd if name.startswith("many") else BATCH // 3
        players = [asyncio.create_task(self.play(fleet, name, hit)) for _ in range(size)]
        await hit.wait()
        await asyncio.sleep(self.rng.uniform(0, 0.6))
        if name == "engine restarted" and self.engine:
            await asyncio.to_thread(self.engine.restart, self.rng)
        elif name == "server killed":
            await asyncio.to_thread(self.server.restart)
        await asyncio.gather(*players)

    async def run(self, count: int, seconds: float) -> int:
        """Play among `count` faults and return the number of containers that are left."""
        kinds = [name for name in KINDS if self.engine or name not in OWN_ENGINE]
        names = kinds[-count:] + self.rng.choices(kinds, [KINDS[name].weight for name in kinds], k=count - len(kinds))
        own = [name for name in names if name not in FOR_ALL]
        self.rng.shuffle(own)
        rounds = [[name] for name in names if name in FOR_ALL] + [own[i : i + BATCH] for i in range(0, len(own), BATCH)]
        self.rng.shuffle(rounds)
        start, done = time.monotonic(), 0
        async with Fleet(self.server.address, patience=300.0) as fleet:
            for batch in rounds:
                if time.monotonic() - start > seconds:
                    break
                for name in batch:
                    self.tallies[name].faults += 1
                if "image missing" in batch:
                    self.remove_image("gone")
                work: list[Coroutine[Any, Any, None]] = [self.play(fleet, name) for name in batch]
                if batch[0] in FOR_ALL:
                    work[0].close()
                    work = [self.play_for_all(fleet, batch[0])]
                await asyncio.gather(*work)
                await fleet.close_sessions(fleet.sessions)
                if batch[0] == "disk full":  # until its files are removed with their containers
                    await self.wait_until_few(len(VERIFIERS) + 1)
                if self.server.process.poll() is not None:
                    raise RuntimeError(f"the server has ended:\n{self.server.log[-2000:]}")
                done += len(batch)
                print(f"{done} of {len(names)} faults, {time.monotonic() - start:.0f} s: {Counter(batch)}", flush=True)
            left = await self.wait_until_few(len(VERIFIERS) + 1)  # one is warm for each environment
        self.server.kill()
        return left + await self.wait_until_few(0)

    def remove_image(self, task: str) -> None:
        with suppress(Exception):
            self.api.remove_image(TaskFolder.read(self._folder / task).image, force=True)


COLUMNS: Columns = {
    "Fault": lambda row: row["kind"],
    "Faults": lambda row: f"{row['faults']}",
    "Episodes": lambda row: f"{sum(row['outcomes'].values())}",
    "Solved": lambda row: f"{row['outcomes'].get('solved', 0)}",
    "Replayed": lambda row: f"{row['outcomes'].get('recovered', 0)}",
    "Lost": lambda row: f"{row['outcomes'].get('lost', 0)}",
    "Error": lambda row: f"{row['outcomes'].get('internal', 0)}",
    "Rules broken": lambda row: f"{sum(row['broken'].values())}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="image of the tasks")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=1e3, help="time after which no further fault begins")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--crowd", type=int, default=64, help="sessions at once in the fault of that name")
    parser.add_argument("--shared-engine", action="store_true", help="use the running engine, and never restart it")
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/machine_faults.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        own = None if arguments.shared_engine else resources.enter_context(closing(OwnEngine(arguments.base)))
        for name, (tests, seconds) in VERIFIERS.items():
            task = write_task(Path(folder) / name, tests=tests, settings=PARTS.format(seconds))
            (task / "environment/Dockerfile").write_text(
                f"# {os.getpid()} {name}\nFROM {arguments.base}\nWORKDIR /app\n"
            )
        faults = resources.enter_context(closing(Faults(arguments, Path(folder), own)))
        start = time.monotonic()
        left = asyncio.run(faults.run(arguments.faults, 60 * arguments.minutes))
        minutes = (time.monotonic() - start) / 60
    results = [{"kind": kind, **vars(tally)} for kind, tally in faults.tallies.items() if tally.faults]
    print_table(list(COLUMNS), cells_of(results, COLUMNS))
    broken = sum(sum(result["broken"].values()) for result in results)
    print(f"in {minutes:.0f} minutes: {broken} rules broken, {left} containers left")
    write_result(arguments.json, {"minutes": round(minutes, 1), "containers_left": left, "results": results})
    return int(bool(broken or left))


if __name__ == "__main__":
    sys.exit(main())
