"""The temporary folder of a server: what killed processes left is removed, and nothing else."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from starpod.env_server.episodes.temporary import PREFIX
from starpod.serving.folders import LOCKED_WITHIN_SECONDS, make_locked_folder, remove_left_over

WARM = "from starpod.env_server.processes.forking import warm_up; warm_up()"
KILLED = f"{WARM}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def aged(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    os.utime(folder, times=(0, folder.stat().st_mtime - 2 * LOCKED_WITHIN_SECONDS))
    return folder


def test_a_killed_server_leaves_one_folder_and_the_next_one_removes_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": parent}, check=False)
        (left,) = Path(parent).iterdir()
        assert left.name.startswith(PREFIX) and list(left.iterdir()), "the fork server had its socket there"
        remove_left_over(PREFIX, left.parent)
        assert left.exists(), "another process may be about to lock it"
        while left.exists():  # the fork server holds the lock until it sees that its parent is gone
            remove_left_over(PREFIX, aged(left).parent)
            time.sleep(0.01)


def test_sockets_fit_beside_a_long_folder_of_temporary_files(tmp_path: Path) -> None:
    (long := tmp_path / ("x" * 70)).mkdir()
    subprocess.run([sys.executable, "-c", WARM], env={**os.environ, "TMPDIR": str(long)}, check=True)


def test_folders_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = aged(make_locked_folder(PREFIX, tmp_path))
    left, strange, linked = (aged(tmp_path / name) for name in (f"{PREFIX}left", "pymp-strange", "linked"))
    (tmp_path / f"{PREFIX}link").symlink_to(linked)
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        remove_left_over(PREFIX, tmp_path)
    assert left.exists()
    make_locked_folder(PREFIX, tmp_path)
    assert not left.exists()
    assert alive.exists() and strange.exists() and linked.exists()
