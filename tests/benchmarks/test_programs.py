"""Every program of benchmarks/ runs, with sizes as small as can be, and writes nothing into docs/."""

import importlib.util
import os
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from _pytest.mark.structures import ParameterSet

from tests.docs.pages import is_benchmark
from tests.support import ROOT

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the programs read /proc"),
    pytest.mark.timeout(900),  # whole programs: one plays among kills with three engines
]


@dataclass(frozen=True)
class Small:
    """One call of a program, with the smallest sizes that it accepts. OUT is replaced by a temporary folder.

    needs: packages that are not installed for tests; mark: marker of calls that are slow or need a model.
    """

    words: str
    needs: tuple[str, ...] = ()
    mark: str = ""


PEERS = ("openenv", "dm_env_rpc", "ray", "gymnasium")
PLOT = ("matplotlib",)
WAYS = "--way 'in process' --way 'starpod, step_many' --way 'starpod, coroutines' --way 'starpod, unary, blocking'"
PROGRAMS = {
    "fleet.placement": Small(
        "--servers 10 --sessions 64 --group 4 --clients 2 --json OUT/a.json --plot OUT/a.svg", PLOT
    ),
    "serving.gateway": Small("--sessions 2 --turns 2 --engine-seconds 0.01 --json OUT/a.json"),
    "serving.gateway_kills": Small("--kills 2 --iterations 1 --json OUT/a.json", mark="minutes"),
    "serving.http": Small("--sessions 1 --seconds 0.1 --rounds 1 --json OUT/a.json"),
    "serving.hub": Small("--no-planted --minutes 0.001 bandit --json OUT/a.json"),
    "serving.sessions": Small("--sessions 4 --idle 0.1 --environment frozen_lake-v1 --json OUT/a.json", mark="minutes"),
    "serving.tail": Small("--sessions 4 --seconds 0.2 --rounds 1 --json OUT/a.json", mark="minutes"),
    "serving.throughput": Small(f"--sessions 1,2 --seconds 0.05 --rounds 1 --no-report {WAYS}"),
    "serving.workloads": Small("--sessions 2 --seconds 0.1 --no-report", PEERS),
    "training.asynchrony": Small(
        "--staleness 0 --iterations 1 --rounds 1 --runs OUT/runs --json OUT/a.json", mark="minutes"
    ),
    "training.collection": Small(
        "--groups 2 --size 2 --turns 2 --rounds 1 --shortest 0.001 --longest 0.002 --imitate 1 --out OUT", PLOT
    ),
    "training.experiment": Small(
        "bandit --seeds 1 --runs OUT/runs --out OUT/results --set collect.groups=4 --set collect.group_size=4 "
        "--set warm_start.steps=40 --set warm_start.episodes=60 --set stop.iterations=3 --set evaluation.episodes=4 "
        "--set evaluation.reference=[random]",
        PLOT,
        mark="minutes",
    ),
    "training.gpu_scale": Small("--groups 1 --group-size 2 --reply 4 --iterations 2 --trl OUT --json OUT/a.json"),
    "ui.scale": Small("--runs 2 --episodes 256 --iterations 20 --json OUT/a.json"),
    "webshop.catalogues": Small("--products 50 --sessions 2 --seconds 0.1 --rounds 1 --no-report", mark="minutes"),
}
ELSEWHERE = {
    "peers.dm_env_rpc_server": "serving.throughput starts it",
    "peers.openenv_server": "serving.throughput starts it",
    "peers.ray_actors": "serving.throughput starts it",
    "peers.vector_env": "serving.throughput starts it",
    "serving.machine_faults": "tests/benchmarks/test_machines.py",
    "serving.machines": "tests/benchmarks/test_machines.py",
    "soak": "tests/faults/test_soak.py",
    "soak.churn": "soak starts it",
    "tables": "tests/docs/test_figures.py compares each page",
    "training.beside_trl": "needs TRL beside a pretrained model",
    "training.trl_run": "training.beside_trl starts it",
    "training.memory": "tests/trainer/run/test_memory.py",
    "training.gpu_check": "tests/trainer/engines/test_vllm_local.py calls it",
}


def programs() -> set[str]:
    files = (ROOT / "benchmarks").rglob("*.py")
    names = {".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts) for file in files}
    return {name.removesuffix(".__main__") for name in names if is_benchmark(name.removesuffix(".__main__"))}


def documents() -> dict[Path, int]:
    """Return the modification time of each file of docs/."""
    return {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*") if path.is_file()}


def cases() -> list[ParameterSet]:
    return [
        pytest.param(name, marks=getattr(pytest.mark, small.mark) if small.mark else ())
        for name, small in PROGRAMS.items()
        if name in programs()
    ]


@pytest.mark.parametrize("name", cases())
def test_a_program_runs_and_leaves_docs_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the program in this process, because each new process would import torch and gRPC again."""
    small = PROGRAMS[name]
    if missing := [each for each in small.needs if importlib.util.find_spec(each) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make test-bench has them")
    before = documents()
    words = shlex.split(small.words.replace("OUT", str(tmp_path)))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with patch.dict(os.environ):
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            assert not ended.code
    assert documents() == before
    written = [word for word in words if word.startswith(str(tmp_path)) and Path(word).suffix]
    assert [file for file in written if not Path(file).stat().st_size] == []


def test_every_program_is_run_here_or_elsewhere() -> None:
    assert programs() <= {*PROGRAMS, *ELSEWHERE}
    assert set(re.findall(r"python -m benchmarks\.([\w.]+)", (ROOT / "Makefile").read_text())) <= {
        *PROGRAMS,
        *ELSEWHERE,
    }
