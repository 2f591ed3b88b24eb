"""Disks that are full: a run says so and keeps its last good checkpoint; a server goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.client import Fleet
from tests.faults.episodes import ENVIRONMENTS, compare, disturbed
from tests.faults.training import SMALL, learnt, train
from tests.support import ServerProcess

KIBIBYTE = 1024


async def test_a_server_whose_log_is_on_a_full_disk(server: ServerProcess) -> None:
    """/dev/full is a disk without room: it fails each write with ENOSPC."""
    command = [sys.executable, "-m", "starpod.client.main", "serve", *ENVIRONMENTS, "--log-level", "debug"]
    full = ServerProcess(["bash", "-c", 'exec "$@" 2> /dev/full', "bash", *command, "--drain", "1"])
    try:

        async def log(_: Fleet) -> None:
            for seed in range(3):
                async with Fleet(full.address) as fleet:  # each connection is logged
                    await fleet.open("frozen_lake-v1", seed=seed)

        played = await disturbed(full.address, log, timeout=60.0)
        await compare(server.address, played, "full disk under a server's log")
        assert played.recoveries == 0
        assert full.terminate() == 0
    finally:
        full.close()


@contextlib.contextmanager
def little_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A file system of its own with so much room."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.minutes
@pytest.mark.skipif(os.name != "posix", reason="needs mount")
def test_a_run_on_a_full_disk_keeps_its_checkpoint_and_goes_on(tmp_path: Path) -> None:
    """Full in the middle of a checkpoint, at each of several places; then there is room, and the run is resumed."""
    iterations = "stop.iterations=3"
    train(*SMALL, iterations, run_dir=tmp_path / "undisturbed")
    folder = tmp_path / "disk"
    folder.mkdir()
    with little_disk(folder, 1_700):
        errors = train(*SMALL, iterations, run_dir=folder / "run", status=1)
        last = errors.splitlines()[-1]
        assert "checkpoint" in last and "No space left" in last and "untouched" in last, errors
        saved = sorted((folder / "run" / "checkpoints").glob("step-*"))
        assert [path.name for path in saved] == ["step-00000000"]
        # Still no room: it says so again, and nothing is lost.
        errors = train(*SMALL, iterations, run_dir=folder / "run", resume=True, status=1)
        assert "No space left" in errors.splitlines()[-1]
        assert sorted((folder / "run" / "checkpoints").glob("step-*")) == saved
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        train(*SMALL, iterations, run_dir=folder / "run", resume=True)
        assert learnt(folder / "run") == learnt(tmp_path / "undisturbed")


@pytest.mark.minutes
def test_a_file_that_must_not_grow(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as a quota would be: one line says which file could not be written."""
    command = [sys.executable, "-m", "starpod.client.main", "train", *SMALL, "--run-dir", str(tmp_path / "run")]
    limited = ["prlimit", f"--fsize={200 * KIBIBYTE}", *command]
    try:
        done = subprocess.run(limited, capture_output=True, text=True, timeout=110)
    except FileNotFoundError:
        pytest.skip("needs prlimit (util-linux)")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("starpod: cannot write") and "too large" in last and "--resume" in last
