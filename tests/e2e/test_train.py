"""`starpod train` from the outside: whole runs of a tiny policy over real services."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from starpod.cli.main import main
from starpod.trainer.data.files import read_episodes
from starpod.trainer.output.words import final_line
from starpod.trainer.rollout.ahead import Admitted, Ahead
from starpod.trainer.rollout.collect import Collected, Start
from starpod.trainer.rollout.pivots import Recoverability
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.e2e import dying
from tests.e2e.dying import let_engine_die
from tests.support import ServerProcess, children_of, start_server

SMALL = (
    "frozen_lake",
    "collect.groups=4",
    "collect.group_size=4",
    "warm_start.steps=40",
    "warm_start.lr=0.005",
    "warm_start.noise=0.5",
    "warm_start.episodes=60",
    "warm_start.batch_size=16",
    "evaluation.episodes=8",
    "evaluation.every=2",
    "evaluation.reference=[random]",
    "checkpoint.every=1",
    # With a critic, whose state has to go on, too; and a rate that does not know when the run ends.
    "algorithm={preset: starpo-s, filter: {value: 0.5}}",
    "algorithm.mini_batch_size=4",
    "optimizer.schedule=constant",
    "rewards.format_penalty=-0.1",
    "monitor.sinks.tensorboard=false",
    "monitor.screen=plain",
    "stop.minutes=null",
)


COMMAND = (sys.executable, "-m", "starpod.cli.main")


def command(*words: str, run_dir: Path, resume: bool = False, base: Sequence[str] = SMALL) -> list[str]:
    whole = [*COMMAND, "train", *base, *words, "--run-dir", str(run_dir)]
    return [*whole, "--resume"] if resume else whole


def train(*words: str, run_dir: Path, resume: bool = False, status: int = 0, base: Sequence[str] = SMALL) -> str:
    """Runs the command in this process, which has torch already, and returns what it wrote on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as exit_:
        main(command(*words, run_dir=run_dir, resume=resume, base=base)[3:])
    assert (exit_.value.code or 0) == status, errors.getvalue()
    return errors.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations(run_dir: Path) -> int:
    """How many a run has written."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


CLOCKED = ("time", "seconds", "rate/", "time/", "environment/latency", "collect/recoveries")
"""Metrics that depend on the clock, or count what befell the servers."""


def learnt(run_dir: Path) -> list[dict[str, Any]]:
    """All that must be the same in two runs: metrics and evaluations without the clock."""
    records = [{"step": record["step"], **record["metrics"]} for record in lines(run_dir / "metrics.jsonl")]
    records += lines(run_dir / "evaluations.jsonl") + lines(run_dir / "final.json")
    return [{key: value for key, value in record.items() if not key.startswith(CLOCKED)} for record in records]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six iterations in one go."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train("stop.iterations=6", run_dir=folder)
    return folder


def test_a_run_leaves_a_folder_worth_reading(undisturbed: Path) -> None:
    metrics = lines(undisturbed / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    for record in metrics:
        values = record["metrics"]
        assert values["policy/logprob_gap_max"] < 1e-3
        assert values["collect/episodes"] == 16
        assert values["collect/failed"] == 0
        assert 0 <= values["collect/kept_fraction"] <= 1
    assert sum("update/grad_norm" in record["metrics"] for record in metrics) >= 3, "hardly anything was learnt from"
    evaluations = lines(undisturbed / "evaluations.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2, 4, 6]
    assert evaluations[0]["reference"]["random"]["success"] >= 0
    assert all(record["success_low"] <= record["success"] <= record["success_high"] for record in evaluations)
    assert (undisturbed / "config.yaml").exists()
    assert "<html" in (undisturbed / "report.html").read_text()
    assert len(list((undisturbed / "episodes").glob("eval-*.jsonl"))) == 4
    # The figure of the end is on start states that chose nothing.
    (final,) = lines(undisturbed / "final.json")
    assert (final["last_step"], final["episodes"], final["greedy"]["episodes"]) == (6, 8, 8)
    held_out = {line["seed"] for file in (undisturbed / "episodes").glob("eval-*") for line in lines(file)}
    assert set(final["results"]["seed"]) == set(range(8)) and held_out == set(range(5000, 5008))


def test_three_and_three_is_six(undisturbed: Path, tmp_path: Path) -> None:
    """Resumed from its checkpoint, a run goes on bit for bit."""
    train("stop.iterations=3", run_dir=tmp_path / "run")
    train("stop.iterations=6", run_dir=tmp_path / "run", resume=True)
    resumed = [record for record in learnt(tmp_path / "run") if record["step"] != 3 or "episodes" not in record]
    assert resumed == learnt(undisturbed)


@pytest.mark.minutes
def test_methods_that_are_not_used_change_no_digit(undisturbed: Path, tmp_path: Path) -> None:
    """The same run with each key of every section written out, those of the methods too."""
    whole = yaml.safe_load((undisturbed / "config.yaml").read_text()) | {"stages": []}
    assert (whole["script"]["name"], whole["scorer"]["kind"]) == ("solo", "off")
    assert (whole["collect"]["search"]["strategy"], whole["algorithm"]["order"]) == ("none", "together")
    assert {"relations", "tools", "criteria", "subgoals", "improvement", "verdict"} <= whole["rewards"].keys()
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(whole))
    train("stop.iterations=2", run_dir=tmp_path / "run", base=[str(tmp_path / "whole.yaml")])
    assert learnt(tmp_path / "run")[:2] == learnt(undisturbed)[:2]


@pytest.mark.minutes
def test_a_run_that_searches_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The regression that chooses pivots is fitted to earlier ones, so it has to be in the checkpoint."""
    search = {"strategy": "pivots", "width": 4, "scale": "std"}
    words = [*(f"collect.search.{name}={value}" for name, value in search.items()), "warm_start.imitate_noise=true"]
    train("stop.iterations=6", *words, run_dir=tmp_path / "whole")
    train("stop.iterations=3", *words, run_dir=tmp_path / "run")
    pivots = Recoverability()
    state = json.loads((tmp_path / "run" / "checkpoints" / latest(tmp_path / "run") / "state.json").read_text())
    pivots.load_state_dict(state["pivots"])
    assert pivots.fitted
    train("stop.iterations=6", *words, run_dir=tmp_path / "run", resume=True)
    resumed = [record for record in learnt(tmp_path / "run") if record["step"] != 3 or "episodes" not in record]
    assert resumed == learnt(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert all(record["search/branches"] for record in resumed if "search/forks" in record)


@pytest.mark.minutes
def test_a_run_that_sees_goes_on_bit_for_bit(tmp_path: Path) -> None:
    seeing = ("visual_lake", *SMALL[1:])
    train("stop.iterations=4", run_dir=tmp_path / "whole", base=seeing)
    train("stop.iterations=2", run_dir=tmp_path / "run", base=seeing)
    train("stop.iterations=4", run_dir=tmp_path / "run", resume=True, base=seeing)
    assert learnt(tmp_path / "run") == learnt(tmp_path / "whole")
    (final,) = (tmp_path / "run" / "episodes").glob("final-*.jsonl")
    (episode, *_) = read_episodes(final)
    assert all(turn.image for turn in episode.turns)


@pytest.mark.minutes
def test_a_schedule_and_rollouts_go_on_where_they_stood(tmp_path: Path) -> None:
    words = ("optimizer.schedule=cosine", "optimizer.warmup_iterations=2", "optimizer.schedule_iterations=4")
    train("stop.iterations=4", *words, run_dir=tmp_path / "whole")
    train("stop.iterations=2", *words, run_dir=tmp_path / "run")
    train("stop.iterations=4", *words, run_dir=tmp_path / "run", resume=True)
    whole, resumed = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    rates = [record["metrics"].get("update/learning_rate") for record in whole]
    assert rates == [record["metrics"].get("update/learning_rate") for record in resumed]
    expected = [5e-4 * factor for factor in (1 / 3, 2 / 3, 1, 0.5)]
    assert all(rate is None or rate == pytest.approx(wanted) for rate, wanted in zip(rates, expected, strict=True))
    assert rates.count(None) <= 1
    for name in ("whole", "run"):
        files = sorted((tmp_path / name / "episodes").glob("train-*.jsonl.gz"))
        assert [file.name for file in files] == [f"train-{step:06}.jsonl.gz" for step in (1, 2, 3, 4)]
    one, other = (
        [(turn.reply, turn.logprobs) for episode in read_episodes(folder / files[2].name) for turn in episode.turns]
        for folder in (tmp_path / "whole" / "episodes", files[2].parent)
    )
    assert one == other and len(one) >= 16


def weights(run_dir: Path) -> dict[str, str]:
    """Digests of what the last checkpoint holds."""
    folder = run_dir / "checkpoints" / latest(run_dir)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


class LockStep(Ahead):
    """Plays groups where they are taken, all of them in one call."""

    def admit(self, starts: Iterable[Start]) -> None:
        self._admitted |= {start.id: Admitted(start) for start in starts}

    async def take(self, starts: Sequence[Start], *, min_size: int = 1) -> Collected:
        self._admitted.clear()
        return await self._collector.collect(starts, self._size, min_size=min_size)


def test_no_staleness_is_lock_step_bit_for_bit(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same metrics and weights as where collecting is a function that is called and returns."""

    monkeypatch.setattr("starpod.trainer.run.Ahead", LockStep)
    train("stop.iterations=6", run_dir=tmp_path / "run")
    assert learnt(tmp_path / "run") == learnt(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.minutes
def test_a_run_that_collects_ahead_loses_no_group_to_kills(tmp_path: Path) -> None:
    """Every start state is trained on once, in order, none later than it may be, whatever is killed and resumed."""
    words = ("stop.iterations=6", "collect.max_staleness=2")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        if killed(folder, 2, *words[1:]) and killed(folder, 4, *words[1:]):
            break
    else:
        pytest.fail("it always ended before it could be killed")
    state = json.loads((folder / "checkpoints" / latest(folder) / "state.json").read_text())
    step = state["step"]
    assert [group["start"]["id"] for group in state["ahead"]] == list(range(step * 4, min(step + 2, 6) * 4))
    train(*words, run_dir=folder, resume=True)
    records = [record["metrics"] for record in lines(folder / "metrics.jsonl")]
    assert len(records) == 6
    assert max(record["collect/staleness_max"] for record in records) in (1, 2)
    assert all(record["collect/stale_groups"] == 0 for record in records)
    # Tokens of older policies are weighted; those of the present one are checked.
    assert all(record.get("policy/logprob_gap_max", 0) < 1e-3 for record in records)
    files = sorted((folder / "episodes").glob("train-*.jsonl.gz"))
    trained = [[episode.group for episode in read_episodes(file)] for file in files]
    assert trained == [[step * 4 + group for group in range(4) for _ in range(4)] for step in range(6)]


def latest(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "latest").read_text().strip()


def killed(run_dir: Path, after: int, *words: str) -> bool:
    """Kills a run after so many iterations. False if it was over first, as this process was held up."""
    process = subprocess.Popen(
        [*command("stop.iterations=6", *words, run_dir=run_dir), "--resume-or-start"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and iterations(run_dir) < after:
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_killed_run_goes_on_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    """SIGKILL, in the middle of whatever it was doing, twice."""
    folders = (tmp_path / str(attempt) for attempt in range(5))
    folder = next((each for each in folders if killed(each, 2) and killed(each, 4)), None)
    assert folder, "it always ended before it could be killed"
    train("stop.iterations=6", run_dir=folder, resume=True)
    assert learnt(folder) == learnt(undisturbed)


@pytest.mark.parametrize(
    ("phase", "step", "saved"),
    [
        ("collect", 1, 0),
        pytest.param("sync", 3, 2, marks=pytest.mark.minutes),
        pytest.param("evaluate", 0, 0, marks=pytest.mark.minutes),
        pytest.param("collect", 4, 3, marks=pytest.mark.minutes),
        pytest.param("evaluate", 4, 4, marks=pytest.mark.minutes),
        pytest.param("evaluate_final", 6, 6, marks=pytest.mark.minutes),
    ],
)
def test_an_engine_that_dies_costs_no_finished_iteration(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, step: int, saved: int
) -> None:
    """The weights are whole: they are saved as of the last finished step, and the run goes on bit for bit."""
    # The best checkpoint is kept, as in the undisturbed run: the final figure is of that one.
    folder, words = tmp_path / "run", ("stop.iterations=6", "checkpoint.every=25")
    with monkeypatch.context() as patch:
        let_engine_die(phase, step, patch.setattr)
        *_, told = train(*words, run_dir=folder, status=1).splitlines()
    again = f"starpod train --resume --run-dir {folder}"
    assert told == f"starpod: the engine is dead; the run is saved as of step {saved}, go on with: {again}"
    assert latest(folder) == f"step-{saved:08}"
    train(*words, run_dir=folder, resume=True)
    assert learnt(folder) == learnt(undisturbed)


@pytest.mark.minutes
def test_an_engine_that_dies_loses_no_group_that_was_collected_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    words = ("stop.iterations=6", "collect.max_staleness=2", "checkpoint.every=25", "checkpoint.keep_best=false")
    with monkeypatch.context() as patch:
        let_engine_die("collect", 4, patch.setattr)
        told = train(*words, run_dir=folder, status=1)
    state = json.loads((folder / "checkpoints" / latest(folder) / "state.json").read_text())
    # What was played ahead may last until the evaluation after that step.
    assert (step := state["step"]) in (3, 4) and f"the run is saved as of step {step}" in told
    assert [group["start"]["id"] for group in state["ahead"]] == list(range(step * 4, (step + 2) * 4))
    assert state["cursor"]["taken"] == (step + 2) * 4
    train(*words, run_dir=folder, resume=True)
    files = sorted((folder / "episodes").glob("train-*.jsonl.gz"))
    trained = [[episode.group for episode in read_episodes(file)] for file in files]
    assert trained == [[step * 4 + group for group in range(4) for _ in range(4)] for step in range(6)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.tiny.hidden=32"], "model.tiny"),
        (["algorithm=starpo-grpo"], "say it twice: --change algorithm.advantage"),
        (["algorithm=starpo-grpo", "--change=algorithm.advantage"], "has no critic"),
        (["environment.options.size=5"], "say it twice: --change environment.options"),
        (["seed=7"], "resume with the same seeds"),
        (["algorithm.kl.where=reward"], "holds no reference policy"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_changes_nothing(
    undisturbed: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    errors = train("stop.iterations=7", *words, run_dir=folder, resume=True, status=2)
    assert told in errors
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_goes_on_with_its_own_configuration(undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as exit_:
        main(["train", "--resume", "--run-dir", str(folder), "stop.iterations=7"])
    assert not exit_.value.code, errors.getvalue()
    was, now = (yaml.safe_load((path / "config.yaml").read_text()) for path in (undisturbed, folder))
    assert now.pop("stop") == {**was.pop("stop"), "iterations": 7}
    assert now == was
    assert iterations(folder) == 7
    told = errors.getvalue()
    for command in ("train --resume --run-dir", "watch", "export"):
        assert f"starpod {command} {folder}" in told


def test_another_environment_is_refused_unless_it_is_said_twice(undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    config = (folder / "config.yaml").read_bytes()
    errors = train("environment=bandit-v1", run_dir=folder, resume=True, status=2)
    assert "environment.id is 'bandit-v1', but the run that is resumed has 'frozen_lake-v1'" in errors
    assert (folder / "config.yaml").read_bytes() == config
    words = ["environment.options.size=5", "stop.iterations=7", "--change=environment.options"]
    train(*words, run_dir=folder, resume=True)
    assert yaml.safe_load((folder / "config.yaml").read_text())["environment"]["options"]["size"] == 5


@pytest.mark.minutes
def test_best_is_the_best_evaluation(tmp_path: Path) -> None:
    """Evaluated every two iterations and saved every five: what is best is saved when it is found."""
    folder = tmp_path / "run"
    told = train("stop.iterations=6", "checkpoint.every=5", run_dir=folder)
    evaluations = lines(folder / "evaluations.jsonl")
    top = max(record["success"] for record in evaluations)
    best = [record["step"] for record in evaluations if record["success"] == top]
    held = int((folder / "checkpoints" / "best").read_text().split("-")[1])
    assert held in best
    assert f"best: the checkpoint of step {held}\n" in told
    (final,) = lines(folder / "final.json")
    assert final["step"] == held and f"final: {final_line(final)}\n" in told
    assert f"The checkpoint called best holds step {held}." in (folder / "report.html").read_text()


def test_two_trainers_do_not_share_a_folder(undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    program = (
        "import sys; from pathlib import Path; from starpod.trainer.output.run_folder import RunFolder\n"
        f"with RunFolder(Path({str(folder)!r})).lock(): print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        errors = train("stop.iterations=7", run_dir=folder, resume=True, status=1)
        assert f"another trainer (process {other.pid} on " in errors
        assert iterations(folder) == 6
        other.kill()
    train("stop.iterations=7", run_dir=folder, resume=True)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.minutes)]
)
def test_a_signal_saves_and_stops(undisturbed: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen(
            command("stop.iterations=6", run_dir=folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and not iterations(folder):
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=250)
        if iterations(folder) < 6:
            break  # else it was over before the signal, as this process was held up
    assert process.returncode == status, errors
    assert f"go on: starpod train --resume --run-dir {folder}\n" in errors
    train("stop.iterations=6", run_dir=folder, resume=True)
    assert learnt(folder) == learnt(undisturbed)


@pytest.mark.parametrize(
    ("phase", "words", "saved"),
    [
        pytest.param("collecting 90000 demonstrations", ["warm_start.episodes=90000"], None, marks=pytest.mark.minutes),
        pytest.param("imitating", ["warm_start.steps=100000"], None, marks=pytest.mark.minutes),
        ("collecting\n", ["collect.groups=3000"], "step-00000000"),
        pytest.param("evaluating", ["evaluation.episodes=5000"], "step-00000000", marks=pytest.mark.minutes),
    ],
)
def test_a_signal_waits_for_nothing_that_takes_minutes(
    tmp_path: Path, phase: str, words: list[str], saved: str | None
) -> None:
    folder = tmp_path / "run"
    whole = command("warm_start.steps=5", *words, run_dir=folder)
    with subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while phase not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 143, errors
    assert (latest(folder) if saved else None) == saved
    again = f": starpod train --resume --run-dir {folder}\n" if folder.exists() else "give the same command again"
    assert again in errors and "Warning" not in errors and "Error" not in errors
    assert iterations(folder) == 0
    evaluations = folder / "evaluations.jsonl"
    assert evaluations.exists() == (phase == "collecting\n"), "what was begun was not finished"


def live_sessions(server: ServerProcess) -> int:
    with grpc.insecure_channel(server.address) as channel:
        return EnvironmentServiceStub(channel).Describe(pb.DescribeRequest(), wait_for_ready=True).live_sessions


def train_on_lost_servers(run_dir: Path) -> int:
    """Six iterations on two replicas, each killed and started again while episodes are played. Returns the kills."""
    with start_server("frozen_lake-v1") as first, start_server("frozen_lake-v1") as second:
        stop = threading.Event()
        kills = 0

        def torment(servers: Sequence[ServerProcess]) -> None:
            nonlocal kills
            while not stop.wait(0.02):
                if live_sessions(victim := servers[kills % 2]):
                    victim.restart()
                    kills += 1
                    stop.wait(0.5)

        thread = threading.Thread(target=torment, args=((first, second),))
        thread.start()
        try:
            addresses = f"environment.addresses=[{first.address},{second.address}]"
            train("stop.iterations=6", addresses, run_dir=run_dir)
        finally:
            stop.set()
            thread.join()
    return kills


def test_lost_servers_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    """The same metrics. Where this machine is slow, few kills may hit an episode: then again."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        kills = train_on_lost_servers(folder)
        assert learnt(folder) == learnt(undisturbed)
        recoveries = lines(folder / "metrics.jsonl")[-1]["metrics"]["collect/recoveries"]
        if kills >= 2 and recoveries > 0:
            return
    pytest.fail(f"{kills} kills, {recoveries} recoveries")


@pytest.mark.minutes
def test_services_of_its_own_that_are_killed_come_back_and_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(command("stop.iterations=6", run_dir=folder), stdout=subprocess.DEVNULL) as process:
        for after, with_supervisor in ((1, False), (2, True), (4, True)):
            while iterations(folder) < after:
                assert process.poll() is None
                time.sleep(0.02)
            while not ((services := children_of(process.pid)) and (workers := children_of(services[0]))):
                time.sleep(0.02)
            for victim in services * with_supervisor + workers:
                os.kill(victim, signal.SIGKILL)
    assert process.returncode == 0
    assert learnt(folder) == learnt(undisturbed)


@pytest.mark.minutes
def test_two_ranks_do_what_one_does(undisturbed: Path, tmp_path: Path) -> None:
    """torchrun with two processes, the policy sharded between them: the same figures to float tolerance."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", *COMMAND]
    arguments = command("stop.iterations=2", run_dir=tmp_path / "run")[3:]
    done = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    ours, theirs = lines(tmp_path / "run" / "metrics.jsonl"), lines(undisturbed / "metrics.jsonl")
    for one, other in zip(ours, theirs[: len(ours)], strict=True):
        a = {key: value for key, value in one["metrics"].items() if not key.startswith(CLOCKED)}
        b = {key: value for key, value in other["metrics"].items() if not key.startswith(CLOCKED)}
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)
    assert len(ours) == 2
    # Before the first update nothing is rounded otherwise, so the ranks' shares are one rank's episodes.
    one, other = (lines(run / "evaluations.jsonl")[0] for run in (tmp_path / "run", undisturbed))
    assert {**one, "time": 0, "seconds": 0} == {**other, "time": 0, "seconds": 0}
    assert one["episodes"] > 1


@pytest.mark.minutes
def test_an_engine_that_dies_on_one_rank_ends_all_of_them_with_a_checkpoint(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", dying.__name__]
    arguments = command("checkpoint.every=25", "checkpoint.keep_best=false", run_dir=tmp_path / "run")[3:]
    for place in ("1 collect 3", "0 evaluate 4"):
        environment = os.environ | {dying.PLACE: place}
        done = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=250, env=environment)
        rank, _, step = place.split()
        saved = int(step) - ("collect" in place)
        assert done.returncode == 1, done.stderr
        assert f"rank {rank}: the engine is dead; the run is saved as of step {saved}, go on with" in done.stderr
        assert latest(tmp_path / "run") == f"step-{saved:08}"
        assert iterations(tmp_path / "run") == saved
        arguments.append("--resume")


def test_nothing_is_overwritten(undisturbed: Path) -> None:
    before = (undisturbed / "metrics.jsonl").read_bytes()
    errors = train("stop.iterations=1", run_dir=undisturbed, status=1)
    assert "--resume" in errors
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["collect.gruops=4"], "groups"),
        (["algorithm=starpo-x"], "starpo"),
        (["collect.group_size=one"], "group_size"),
        (["stop.iterations"], "key=value"),
        (["sampling.top_p=0.9"], "top_p"),
    ],
)
def test_a_mistake_is_explained_in_a_line(tmp_path: Path, words: list[str], told: str) -> None:
    errors = train(*words, run_dir=tmp_path / "run", status=2)
    assert told in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_of_the_environment_is_named(tmp_path: Path) -> None:
    for word in ("environment.options.sise=4", "evaluation.options.sise=4"):
        errors = train(word, "stop.iterations=1", run_dir=tmp_path / word, status=2)
        assert "size" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["environment=frozen_lak-v1"], "frozen_lake-v1"),
        (["environment.serve=[--prot, '1']"], "--prot"),
        (["rewards.shaping={absent: 1.0}"], "no reward function"),
        (["replay.offline=absent.jsonl"], "does not exist"),
        (["warm_start.thought={words[99]}"], "warm_start.thought"),
    ],
)
def test_a_configuration_that_turns_out_wrong_begins_nothing(tmp_path: Path, words: list[str], told: str) -> None:
    assert told in train(*words, "stop.iterations=1", run_dir=tmp_path / "run", status=2).splitlines()[-1]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_model_that_cannot_be_had_is_told_before_anything_is_played(tmp_path: Path) -> None:
    (absent := tmp_path / "absent").mkdir()
    told = train(f"model={absent}", "stop.iterations=1", run_dir=tmp_path / "run", status=1)
    assert f"cannot load model '{absent}'" in told.splitlines()[-1]
    assert "demonstration" not in told
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_what_would_be_used(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command("algorithm=starpo-grpo", "collect.groups=5", run_dir=tmp_path / "run"), "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "groups: 5" in done.stdout
    assert "preset: starpo-grpo" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.minutes
def test_stages_go_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    """Two horizons and a KL term that begins late, cut within a stage that waits for a metric."""
    sets = "environment.expert_moves_left: 2, environment.max_turns: 4, algorithm.kl.where: off"
    near = f"{{until: {{iteration: 1}}, set: {{{sets}}}}}"
    short = "{until: {metric: collect/success, at_least: 0.0, patience: 2}, set: {environment.max_turns: 5}}"
    words = (f"stages=[{near}, {short}]", "algorithm=starpo-ppo")
    train("stop.iterations=4", *words, run_dir=tmp_path / "whole")
    records = lines(tmp_path / "whole" / "metrics.jsonl")
    assert [record["metrics"]["collect/stage"] for record in records] == [0, 1, 1, 2]
    turns = [record["metrics"]["collect/turns_mean"] for record in records]
    assert turns[0] <= 4 and max(turns[1:3]) <= 5
    begun = [episode.begun_at for episode in read_episodes(tmp_path / "whole" / "episodes" / "train-000001.jsonl.gz")]
    assert max(begun) > 0
    train("stop.iterations=2", *words, run_dir=tmp_path / "cut")
    train("stop.iterations=4", *words, run_dir=tmp_path / "cut", resume=True)
    whole, cut = (
        [record for record in learnt(tmp_path / name) if record["step"] != 2 or "episodes" not in record]
        for name in ("whole", "cut")
    )
    assert whole == cut
    errors = train("algorithm=starpo-ppo", run_dir=tmp_path / "cut", resume=True, status=2)
    assert "stages is []" in errors and "--change stages" in errors
