"""Environment services on this machine, each a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from starpod.client.nearest import unknown_environment
from starpod.trainer.rollout.collect import EnvironmentConfig
from starpod.trainer.section import ConfigError

STOP_SECONDS = 10.0


class ServiceFailed(Exception):
    """`starpod serve` did not come up. The message holds what it wrote on standard error."""


def check_installed(config: EnvironmentConfig) -> None:
    """Raises ConfigError where this machine is to serve an environment that no installed package has.

    Says nothing of servers that run already, and of services with arguments of their own, which may host more.
    """
    if config.addresses or config.serve:
        return
    installed = [entry.name for entry in entry_points(group="starpod.environments")]
    if config.id not in installed:
        raise ConfigError(f"environment.id: {unknown_environment(config.id, installed).message}")


@contextlib.contextmanager
def local_services(environments: Sequence[str], *, workers: int = 1, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Runs `starpod serve` while the context lasts and yields its address.

    environments: what it hosts. workers: server processes. arguments: handed on as they are.
    Raises ServiceFailed with the server's own words if it does not become ready, ConfigError where it was called wrong.
    """
    command = [sys.executable, "-m", "starpod.cli.main", "serve", *environments]
    # With its end of the pipe the trainer takes the services along, even if it is killed outright. No function between
    # fork and exec, which could ask the system for that: fork is no safe call in a process with gRPC's threads.
    command += ["--port", "0", "--workers", str(workers), "--end-with-stdin", *arguments]
    with (
        tempfile.TemporaryFile(mode="w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Ctrl-C is the trainer's: it saves, with the services still there, and stops them itself.
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                process.wait(STOP_SECONDS)
                log.seek(0)
                # As every command of ours, it says by 2 that the call was wrong.
                raise (ConfigError if process.returncode == 2 else ServiceFailed)(
                    f"the environment service did not start (`{' '.join(command)}`): "
                    + (log.read().strip() or f"it ended with status {process.returncode} and said nothing")
                )
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
