"""examples/slurm: the script trains on two nodes. Slurm's commands are played by two processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, held_port
from tests.training import SMALL, lines

COMMANDS = {
    "scontrol": 'echo "node0 node1" | sed "s/node./127.0.0.1/g" | tr " " "\\n"',
    # srun --kill-on-bad-exit=1 COMMAND: once on each node.
    "srun": 'shift; "$@" & first=$!; "$@" & second=$!; wait $first && wait $second',
    "bin/activate": "",
}


@pytest.mark.minutes
def test_the_script_trains_on_two_nodes(tmp_path: Path) -> None:
    for name, text in COMMANDS.items():
        (path := tmp_path / (".venv" if "/" in name else "bin") / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    programs = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with held_port() as port:
        done = subprocess.run(
            ["bash", ROOT / "examples" / "slurm" / "train.sbatch", *SMALL, "stop.iterations=1", "--run-dir", "run"],
            cwd=tmp_path,
            env={**os.environ, **slurm, "RENDEZVOUS_PORT": str(port), "PATH": programs, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    (iteration,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert iteration["metrics"]["collect/episodes"] == 16  # of both nodes
