"""Full disks: a run reports the error and keeps its last good checkpoint; a server keeps running."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.client import Fleet
from tests.faults.episodes import ENVIRONMENTS, compare_with_undisturbed, disturbed
from tests.support import ServerProcess, small_files
from tests.training import DISTURBED, learnt, train

KIBIBYTE = 1024


@pytest.mark.minutes
async def test_a_server_whose_log_is_on_a_full_disk(server: ServerProcess) -> None:
    """/dev/full is a disk without room: it fails each write with ENOSPC."""
    command = [sys.executable, "-m", "starpod.cli.main", "serve", *ENVIRONMENTS, "--log-level", "debug"]
    full = ServerProcess(["bash", "-c", 'exec "$@" 2> /dev/full', "bash", *command, "--drain", "1"])
    try:

        async def log(_: Fleet) -> None:
            for seed in range(3):
                async with Fleet(full.address) as fleet:  # each connection is logged
                    await fleet.open("frozen_lake-v1", seed=seed)

        played = await disturbed(full.address, log, timeout=60.0)
        await compare_with_undisturbed(server.address, played, "full disk under a server's log")
        assert played.recoveries == 0
        assert full.terminate() == 0
    finally:
        full.close()


@contextlib.contextmanager
def little_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A separate file system of this size."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a failed run may hold a file open


@pytest.mark.minutes
def test_a_run_on_a_full_disk_keeps_its_checkpoint_and_continues(undisturbed_run: Path, tmp_path: Path) -> None:
    """Full in the middle of a checkpoint; then there is room, and the run is resumed."""
    with little_disk(tmp_path, 1_700):
        errors = train(run_dir=tmp_path / "run", status=1, base=DISTURBED)
        last = errors.splitlines()[-1]
        assert "checkpoint" in last and "No space left" in last and "untouched" in last, errors
        assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000000"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
        train(run_dir=tmp_path / "run", resume=True, base=DISTURBED)
        assert learnt(tmp_path / "run") == learnt(undisturbed_run)


@pytest.mark.minutes
def test_a_file_that_must_not_grow(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as a quota would be: one line says which file could not be written."""
    with small_files(200 * KIBIBYTE):
        errors = train(run_dir=tmp_path / "run", status=1, base=DISTURBED)
    last = errors.splitlines()[-1]
    assert last.startswith("starpod: cannot write") and "too large" in last and "give the same command again" in last
