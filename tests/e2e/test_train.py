"""`starpod train` from the outside: whole runs of a tiny policy over real services."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grpc
import pytest
import yaml

from starpod.trainer.data.files import read_episodes
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import final_line
from starpod.trainer.rollout.ahead import Admitted, Ahead
from starpod.trainer.rollout.collect import Collected, Start
from starpod.trainer.rollout.pivots import Recoverability
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.e2e import disturbing
from tests.e2e.disturbing import die, disturb
from tests.support import ServerProcess, start_server
from tests.training import (
    CLOCKED,
    SMALL,
    Screen,
    command,
    interrupt,
    iterations,
    latest,
    learnt,
    lines,
    rewound,
    saved,
    train,
    trained,
    weights,
)

STAGES = (
    "{until: {iteration: 1}, set: {environment.max_turns: 4, algorithm.kl.where: off}}",
    "{until: {metric: collect/success, at_least: 0.0, patience: 2}, set: {environment.max_turns: 5}}",
)
EVERYTHING = (
    *SMALL,
    # All that has a state of its own: a reference policy, stages, a schedule, a replay buffer, and the regression that
    # chooses where to search.
    "algorithm=starpo-ppo",
    f"stages=[{', '.join(STAGES)}]",
    "optimizer.schedule=cosine",
    "optimizer.warmup_iterations=2",
    "optimizer.schedule_iterations=9",
    "collect.search={strategy: pivots, width: 4, scale: std}",
    "warm_start.imitate_noise=true",
    "replay={capacity: 8, groups: 1}",
    "checkpoint.keep=9",
    "stop.iterations=4",
)


@pytest.fixture(scope="module")
def whole(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations in one run. The printed log is in `told`, in the run's folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    told = train(f"environment.addresses=[{server.address}]", run_dir=folder, base=EVERYTHING)
    (folder.parent / "told").write_text(told)
    return folder


def test_a_run_leaves_a_folder_worth_reading(whole: Path) -> None:
    metrics = [record["metrics"] for record in lines(whole / "metrics.jsonl")]
    assert [record["step"] for record in lines(whole / "metrics.jsonl")] == [1, 2, 3, 4]
    for values in metrics:
        assert values["policy/logprob_gap_max"] < 1e-3
        assert (values["collect/episodes"], values["collect/failed"]) == (16, 0)
        assert 0 <= values["collect/kept_fraction"] <= 1
        assert values["search/branches"] or "search/forks" not in values
    # Stages set the longest episode, and the learning rate follows its schedule.
    assert [values["collect/stage"] for values in metrics] == [0, 1, 1, 2]
    turns = [values["collect/turns_mean"] for values in metrics]
    assert turns[0] <= 4 and max(turns[1:3]) <= 5
    rates = [values["update/learning_rate"] for values in metrics]
    assert rates == pytest.approx([5e-4 * factor for factor in (1 / 3, 2 / 3, 1, (1 + math.cos(math.pi / 7)) / 2)])
    pivots = Recoverability()
    pivots.load_state_dict(saved(whole)["pivots"])
    assert pivots.fitted, "the regression is in the checkpoint"

    evaluations = lines(whole / "evaluations.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2, 4]
    assert evaluations[0]["reference"]["random"]["success"] >= 0
    assert all(record["success_low"] <= record["success"] <= record["success_high"] for record in evaluations)
    assert len(list((whole / "episodes").glob("eval-*.jsonl"))) == 3 and len(trained(whole)) == 4
    # The figure of the end is of the best checkpoint, on start states that chose nothing.
    (final,) = lines(whole / "final.json")
    best = max(record["success"] for record in evaluations)
    assert final["step"] in [record["step"] for record in evaluations if record["success"] == best]
    assert (final["last_step"], final["episodes"], final["greedy"]["episodes"]) == (4, 8, 8)
    held_out = {line["seed"] for file in (whole / "episodes").glob("eval-*") for line in lines(file)}
    assert set(final["results"]["seed"]) == set(range(8)) and held_out == set(range(5000, 5008))
    assert f"The checkpoint called best holds step {final['step']}." in (whole / "report.html").read_text()
    told = (whole.parent / "told").read_text()
    for words in (f"final: {final_line(final)}", f"best: the checkpoint of step {final['step']}"):
        assert f"{words}\n" in told
    for words in ("train --resume --run-dir", "watch", "export"):
        assert f"starpod {words} {whole}" in told


class LockStep(Ahead):
    """Plays groups where they are taken, all of them in one call."""

    def admit(self, starts: Iterable[Start]) -> None:
        self._admitted |= {start.id: Admitted(start, self.stage) for start in starts}

    async def take(self, starts: Sequence[Start], *, min_size: int = 1) -> Collected:
        self._admitted.clear()
        collector, size = self._players[self.stage]
        return await collector.collect(starts, size, min_size=min_size)


def restart_in_use(server: ServerProcess) -> Callable[[], bool]:
    """Returns a function that restarts a server if it holds sessions, and says whether it did."""

    def restart() -> bool:
        with grpc.insecure_channel(server.address) as channel:
            in_use = EnvironmentServiceStub(channel).Describe(pb.DescribeRequest()).live_sessions > 0
        if in_use:
            server.restart()
        return in_use

    return restart


def test_nothing_that_happens_to_a_run_changes_a_digit(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run ends with the same weights as an undisturbed one.

    There is a signal in the warm start. A lost server, another signal, a dead engine and SIGKILL follow during
    collections. The run is resumed with its own configuration each time, the last time synchronously.
    """
    folder, killed = tmp_path / "run", tmp_path / "killed"
    again = f"starpod train --resume --run-dir {folder}"

    def go_on(*words: str, status: int, run_dir: Path = folder, **disturbances: Callable[[], object]) -> str:
        with monkeypatch.context() as patch:
            for step, action in disturbances.items():
                disturb("collect", int(step.removeprefix("step_")), action, patch.setattr)
            return train(*words, run_dir=run_dir, resume=True, status=status, base=())

    with start_server("frozen_lake-v1") as one, start_server("frozen_lake-v1") as other:
        words = (f"environment.addresses=[{one.address},{other.address}]", "checkpoint.every=25")
        screen = Screen("imitation 10/20", interrupt(signal.SIGINT))
        train(words[0], run_dir=folder, base=EVERYTHING, status=130, screen=screen)
        assert saved(folder)["warm_start"]["imitations"][""]["step"] < 20
        told = go_on(*words, status=143, step_1=restart_in_use(other), step_2=interrupt(signal.SIGTERM))
        assert f"go on: {again}\n" in told and latest(folder).name == "step-00000001"
        (record,) = lines(folder / "metrics.jsonl")
        assert record["metrics"]["collect/recoveries"] > 0

        *_, told = go_on(status=1, step_3=die).splitlines()
        assert told == f"starpod: the engine is dead; the run is saved as of step 2; continue with: {again}"
        assert latest(folder).name == "step-00000002"

        def kill() -> None:
            shutil.copytree(folder, killed)
            die()

        go_on("checkpoint.every=1", status=1, step_4=kill)
        monkeypatch.setattr("starpod.trainer.run.collecting.Ahead", LockStep)
        go_on(status=0, run_dir=killed)
    assert learnt(killed) == learnt(whole)
    assert weights(killed) == weights(whole)
    was, now = (yaml.safe_load((run / "config.yaml").read_text()) for run in (whole, killed))
    assert now.pop("environment").pop("addresses") == [one.address, other.address] and now.items() <= was.items()


def test_a_run_that_sees_and_begins_near_the_end_continues_bit_for_bit(server: ServerProcess, tmp_path: Path) -> None:
    base = ("visual_lake", *SMALL[1:], f"environment.addresses=[{server.address}]", "environment.expert_moves_left=2")
    few = ("collect.groups=2", "evaluation.episodes=2", "warm_start.steps=10", "warm_start.episodes=20")
    train(*few, "stop.iterations=2", run_dir=tmp_path / "whole", base=base)
    cut = rewound(tmp_path / "whole", 1, tmp_path / "cut")
    train(run_dir=cut, resume=True, base=())
    assert learnt(cut) == learnt(tmp_path / "whole")
    assert max(episode.begun_at for episode in read_episodes(cut / "episodes" / "train-000002.jsonl.gz")) > 0
    (final,) = (cut / "episodes").glob("final-*.jsonl")
    assert all(turn.image for turn in next(iter(read_episodes(final))).turns)


def test_a_run_that_collects_ahead_loses_no_group(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start state is trained on once, in order, none later than it may be, whatever ends and resumes the run."""
    folder = tmp_path / "run"
    words = ("stop.iterations=4", "collect.max_staleness=2", "checkpoint.every=25", "checkpoint.keep_best=false")
    words = (*words, "checkpoint.keep=9", "evaluation.every=0", f"environment.addresses=[{server.address}]")
    with monkeypatch.context() as patch:
        disturb("collect", 2, die, patch.setattr)
        told = train(*words, run_dir=folder, status=1)
    state = saved(folder)
    # What was played ahead may last until after that step.
    assert (step := state["step"]) in (1, 2) and f"the run is saved as of step {step}" in told
    assert [group["start"]["id"] for group in state["ahead"]] == list(range(step * 4, (step + 2) * 4))
    assert state["cursor"]["taken"] == (step + 2) * 4
    train("checkpoint.every=1", run_dir=folder, resume=True, base=())
    killed = rewound(folder, 2, tmp_path / "killed")
    assert [group["start"]["id"] for group in saved(killed)["ahead"]] == list(range(8, 16))
    train(run_dir=killed, resume=True, base=())
    for run in (folder, killed):
        records = [record["metrics"] for record in lines(run / "metrics.jsonl")]
        assert max(record["collect/staleness_max"] for record in records) in (1, 2)
        # Tokens of older policies are weighted; those of the present one are checked.
        assert all(record.get("policy/logprob_gap_max", 0) < 1e-3 for record in records)
        assert [record["collect/stale_groups"] for record in records] == [0] * 4
        assert trained(run) == [list(range(4 * step, 4 * step + 4)) for step in range(4)]


@pytest.mark.parametrize(
    ("words", "phase", "number", "left"),
    [
        ("warm_start.episodes=9000", "collecting 9000 demonstrations", signal.SIGTERM, "give the same command again"),
        ("warm_start.steps=10000", "imitation 10/10000", signal.SIGINT, ": starpod train --resume --run-dir"),
        ("evaluation.episodes=900", "evaluating on 900", signal.SIGTERM, ": starpod train --resume --run-dir"),
    ],
)
def test_a_signal_waits_for_nothing_that_takes_minutes(
    server: ServerProcess, tmp_path: Path, words: str, phase: str, number: signal.Signals, left: str
) -> None:
    folder = tmp_path / "run"
    screen = Screen(phase, interrupt(number))
    few = (
        "warm_start.steps=5",
        "environment.max_turns=1",
        "evaluation.reference=[]",
        f"environment.addresses=[{server.address}]",
    )
    errors = train(*few, words, run_dir=folder, status=128 + number, screen=screen)
    assert left in errors and "Warning" not in errors and "Error" not in errors
    learnt_anything = not phase.startswith("collecting")
    assert [file.name for file in (folder / "checkpoints").glob("step-*")] == ["step-00000000"] * learnt_anything
    assert not (folder / "evaluations.jsonl").exists(), "what was begun was finished"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.tiny.hidden=32"], "model.tiny"),
        (["algorithm=starpo-grpo"], "confirm the change: --change algorithm.advantage"),
        (["algorithm=starpo-grpo", "--change=algorithm.advantage", "--change=stages"], "has no critic"),
        (["environment.options.size=5"], "confirm the change: --change environment.options"),
        (["environment=bandit-v1"], "environment.id is 'bandit-v1', but the run that is resumed has 'frozen_lake-v1'"),
        (["stages=[]"], "stages is []"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_changes_nothing(whole: Path, words: list[str], told: str) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file() and path.name != ".lock"}
    assert told in train("stop.iterations=7", *words, run_dir=whole, resume=True, status=2, base=())
    assert before == {path: path.read_bytes() for path in before}


def test_a_guarded_key_is_changed_where_it_is_said_twice_and_two_trainers_do_not_share_a_folder(
    whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    words = ("environment.options.size=5", "stop.iterations=5", "--change=environment.options")
    with RunFolder(folder).lock():
        errors = train(*words, run_dir=folder, resume=True, status=1, base=())
        assert f"another trainer (process {os.getpid()} on " in errors and iterations(folder) == 4
    train(*words, run_dir=folder, resume=True, base=())
    assert yaml.safe_load((folder / "config.yaml").read_text())["environment"]["options"]["size"] == 5
    assert iterations(folder) == 5
    best = folder / "checkpoints" / (folder / "checkpoints" / "best").read_text().strip()
    options = [json.loads((best / "state.json").read_text())["config"]["environment"]["options"]]
    options += [json.loads((folder / "final.json").read_text())["options"]]
    assert [each["size"] for each in options] == [5, 5], "scores of another lake do not count"
    assert "--resume" in train("stop.iterations=1", run_dir=folder, status=2), "nothing is overwritten"
    assert iterations(folder) == 5


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("collect.gruops=4", 2, "did you mean groups"),
        ("environment.options.sise=4", 2, "size"),
        ("evaluation.options.sise=4", 2, "size"),
        ("environment=frozen_lak-v1", 2, "frozen_lake-v1"),
        ("rewards.shaping={absent: 1.0}", 2, "no reward function"),
        ("replay.offline=absent.jsonl", 2, "does not exist"),
        ("warm_start.thought={words[99]}", 2, "warm_start.thought"),
        ("model=MISSING", 1, "cannot load model 'MISSING'"),
    ],
)
def test_a_configuration_that_is_wrong_is_explained_in_a_line_and_begins_nothing(
    server: ServerProcess, tmp_path: Path, words: str, status: int, told: str
) -> None:
    (missing := tmp_path / "missing").mkdir()
    words, told = (text.replace("MISSING", str(missing)) for text in (words, told))
    addresses = f"environment.addresses=[{server.address}]"
    errors = train(words, addresses, run_dir=tmp_path / "run", status=status)
    assert told in errors.splitlines()[-1]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_own_services_that_refuse_their_words_are_told(tmp_path: Path) -> None:
    assert "--prot" in train("environment.serve=[--prot, '1']", run_dir=tmp_path / "run", status=2).splitlines()[-1]
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.minutes
def test_two_ranks_do_what_one_does_also_where_an_engine_dies_on_one(server: ServerProcess, tmp_path: Path) -> None:
    """torchrun with two processes, the policy sharded between them: the same figures to float tolerance."""
    base = (*SMALL, f"environment.addresses=[{server.address}]", "checkpoint.keep_best=false")
    train("stop.iterations=2", run_dir=tmp_path / "alone", base=base)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--log-dir", str(tmp_path / "logs"), "-m", disturbing.__name__]
    folder = tmp_path / "run"
    for place, resume in (("1 collect 2", False), ("0 evaluate 2", True)):
        words = command("stop.iterations=2", "checkpoint.every=25", run_dir=folder, resume=resume, base=base)
        environment = os.environ | {disturbing.PLACE: place}
        done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=250, env=environment)
        rank, phase, _ = place.split()
        step = 1 if phase == "collect" else 2
        assert done.returncode == 1, done.stderr
        assert f"rank {rank}: the engine is dead; the run is saved as of step {step}; continue with" in done.stderr
        assert (latest(folder).name, iterations(folder)) == (f"step-{step:08}", step)
    ours, theirs = (
        [{key: value for key, value in line["metrics"].items() if not key.startswith(CLOCKED)} for line in records]
        for records in (lines(run / "metrics.jsonl") for run in (folder, tmp_path / "alone"))
    )
    assert ours == [pytest.approx(values, rel=1e-3, abs=1e-4) for values in theirs]
    # Before the first update nothing is rounded otherwise, so the ranks' shares are one rank's episodes.
    one, other = (lines(run / "evaluations.jsonl")[0] for run in (folder, tmp_path / "alone"))
    assert {**one, "time": 0, "seconds": 0} == {**other, "time": 0, "seconds": 0}
    assert one["episodes"] > 1
