"""`starpod train engine=vllm` as a process: signals during sampling, and resuming afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import build_policy
from tests.support import gone
from tests.trainer.engines.real_vllm import serving
from tests.training import CLOCKED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SMALL = (
    "frozen_lake engine.dtype=float32 engine.slots=16 model.tiny.heads=2 collect.groups=4 "
    "collect.group_size=4 warm_start.steps=40 warm_start.lr=0.005 warm_start.episodes=40 warm_start.batch_size=16 "
    "evaluation.episodes=4 evaluation.every=0 evaluation.reference=[] evaluation.greedy=false checkpoint.every=25 "
    "algorithm.mini_batch_size=4 monitor.sinks.tensorboard=false monitor.screen=plain stop.minutes=null "
    "stop.iterations=5"
).split()


def start(folder: Path, *words: str, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The run, as the leader of a process group of its own: as from a terminal."""
    command = [sys.executable, *launcher, "-m", "starpod.cli.main", "train", *words, "--run-dir", str(folder)]
    told = os.environ | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, env=told
    )


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_a_step(run: subprocess.Popen[str], folder: Path, before: int) -> None:
    while run.poll() is None and len(steps(folder)) <= before:
        time.sleep(0.01)


def ended(run: subprocess.Popen[str], status: int, *noise: str) -> str:
    """Return the last output of the run."""
    _, errors = run.communicate(timeout=600)
    assert run.returncode == status, errors
    for each in noise:
        assert each not in errors, errors
    return errors


def cores_of(pid: int) -> list[int]:
    """The engine core and its workers."""
    rows = [line.split() for line in subprocess.check_output(["ps", "-eo", "pid=,ppid=,sid="], text=True).splitlines()]
    core = [int(child) for child, parent, session in rows if int(parent) == pid and session == child]
    return [int(child) for child, _, session in rows if int(session) in core]


def assert_saved(errors: str, folder: Path, what: str) -> None:
    """A run's errors name what was lost, and it is saved as of its last step."""
    # What Python says of a lost core's shared memory comes after it.
    (told,) = (line for line in errors.splitlines() if line.startswith("starpod: "))
    assert what in told
    (step,) = steps(folder)[-1:]
    assert told.endswith(
        f"; the run is saved as of step {step}; continue with: starpod train --resume --run-dir {folder}"
    )
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step-{step:08}"


def test_signals_and_lost_cores_end_a_run_with_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words: tuple[str, ...] = (*SMALL, "engine=vllm")
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = len(steps(folder))
        run = start(folder, *words)
        wait_for_a_step(run, folder, before)
        assert (cores := cores_of(run.pid)), "vLLM has a session of its own"
        # Not the core, which samples the next step.
        os.killpg(run.pid, number)
        ended(run, status, "Traceback", "Error", "Exception", "Killed", "shards", "leaked")
        saved = int((folder / "checkpoints" / "latest").read_text().removeprefix("step-"))
        assert saved == steps(folder)[-1] > before
        assert all(map(gone, cores))
        words = ("--resume",)
    ended(start(folder, "--resume"), 0, "Traceback", "ERROR", "load weight")
    assert steps(folder) == list(range(1, 6))
    gaps = [json.loads(line)["metrics"].get("policy/logprob_gap_max", 0) for line in (folder / "metrics.jsonl").open()]
    assert max(gaps) < 1e-3
    run = start(folder, "--resume", "engine.restarts=0", "stop.iterations=50")
    wait_for_a_step(run, folder, 5)
    for pid in cores_of(run.pid):
        os.kill(pid, signal.SIGKILL)
    assert_saved(ended(run, 1), folder, "vLLM")


def test_a_server_that_is_lost_for_good_costs_no_iteration(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "run"
    shape = {"tiny": {"hidden": 64, "layers": 1, "heads": 2}}
    texts = ["P 1 3 G 0 0 Up Left Down Right _ _ # _ <think> go </think><answer> Up </answer>"]
    build_policy(ModelConfig.model_validate(shape), texts=texts, critic="none", seed=1).save(model)
    with serving(model, *"--max-model-len 1024 --max-num-batched-tokens 1024".split()) as server:
        words = (f"model={model}", "engine=vllm_remote", f"engine.urls=[{server.url}]", "engine.retries=1")
        run = start(folder, *SMALL, *words)
        wait_for_a_step(run, folder, 1)
        server.kill()
        assert_saved(ended(run, 1), folder, server.url)


def metrics(folder: Path, count: int) -> list[dict[str, float]]:
    """The first steps' metrics, without the clock."""
    records = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()[:count]]
    return [{key: value for key, value in each.items() if not key.startswith(CLOCKED)} for each in records]


def test_two_ranks_do_what_one_does_with_an_engine_in_common_and_with_one_each_until_one_dies(tmp_path: Path) -> None:
    alone, shared, folder, logs = (tmp_path / name for name in ("alone", "shared", "run", "logs"))
    words = (*SMALL, "engine=vllm", "optimizer.schedule=constant")
    ended(start(alone, *words, "stop.iterations=2"), 0)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--redirects", "2"]
    ended(start(shared, *words, "stop.iterations=2", "engine.tensor_parallel=2", launcher=launcher), 0)
    run = start(folder, *words, "stop.iterations=50", launcher=[*launcher, "--log-dir", str(logs)])
    wait_for_a_step(run, folder, 1)
    told = subprocess.check_output(["ps", "--ppid", str(run.pid), "-o", "pid="], text=True)
    ranks = {Path(f"/proc/{pid}/environ").read_text().partition("\0RANK=")[2][0]: int(pid) for pid in told.split()}
    assert all(cores_of(pid) for pid in ranks.values())
    for pid in cores_of(ranks["1"]):
        os.kill(pid, signal.SIGKILL)
    ended(run, 1)
    for rank in ranks:
        (errors,) = logs.glob(f"*/attempt_0/{rank}/stderr.log")
        assert_saved(errors.read_text(), folder, "rank 1: ")
    expected = [pytest.approx(values, rel=1e-3, abs=1e-4) for values in metrics(alone, 2)]
    assert metrics(folder, 2) == expected
    assert metrics(shared, 2) == expected
