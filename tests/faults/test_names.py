"""A name that stands for other servers than before: the fleet follows it."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.faults.episodes import ENVIRONMENTS, compare_with_undisturbed
from tests.faults.program import client_program
from tests.support import ServerProcess, start_server

NAME = "environments.test"


def own_hosts_file(hosts: Path) -> list[str]:
    """Return the arguments that run a command with this file as /etc/hosts, in a new mount namespace."""
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    prefix = [*unshare, f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare (util-linux)")
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.strip()}")
    return prefix


async def test_a_name_that_changes(server: ServerProcess, tmp_path: Path) -> None:
    """The name stood for one server, which dies; now it stands for another one."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.2 {NAME}\n")
    prefix = own_hosts_file(hosts)
    with (
        start_server(*ENVIRONMENTS, "--host", "127.0.0.2") as old,
        start_server(*ENVIRONMENTS, "--host", "127.0.0.3", port=old.port),
        client_program(f"dns:///{NAME}:{old.port}", tmp_path, prefix=prefix) as program,
    ):
        await asyncio.sleep(1)
        hosts.write_text(f"127.0.0.3 {NAME}\n")  # the same file: it is mounted
        old.kill()
        played = await asyncio.to_thread(program.finish)
    await compare_with_undisturbed(server.address, played, "name that changes (DNS)")
    assert played.recoveries >= 16
