"""Sinks of metrics: files, TensorBoard, W&B and others."""

import errno
import json
import math
import os
import posixpath
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.output.config import SinkConfig
from starpod.trainer.output.files import CannotWrite, cut_after, read_lines, write_atomic
from starpod.trainer.output.sinks import JsonlSink, Sinks, _mlflow_name, check_sinks

JSONL_ONLY = SinkConfig(tensorboard=False)


def fail(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def metrics_of(path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], line["metrics"]) for line in read_lines(path)]


def test_one_object_per_step_readable_while_the_run_continues(tmp_path: Path) -> None:
    with Sinks(JSONL_ONLY, tmp_path, warn=fail) as sinks:
        sinks.write(1, {"collect/success": 0.5, "policy/kl": math.nan, "update/grad_norm": math.inf})
        sinks.write(2, {"collect/success": 0.6}, ["look out"])
        first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(first, parse_constant=fail)  # standard JSON has no NaN
    assert line["step"] == 1 and line["time"] > 1e9
    assert line["metrics"] == {"collect/success": 0.5, "policy/kl": None, "update/grad_norm": None}
    assert "warnings" not in line and json.loads(second)["warnings"] == ["look out"]


@pytest.mark.parametrize("torn", ["", '{"step": 7, "time": 1.0, "metr', '{"step": 6, "time": 1.0, "metrics": {}}'])
def test_after_resuming_the_file_is_that_of_an_undisturbed_run(tmp_path: Path, torn: str) -> None:
    def write(folder: Path, steps: range, resumed: int | None) -> None:
        with Sinks(JSONL_ONLY, folder, warn=fail, resumed_step=resumed) as sinks:
            for step in steps:
                sinks.write(step, {"value": step * 0.1})

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    write(tmp_path / "whole", range(1, 11), None)
    write(tmp_path / "cut", range(1, 6), None)  # steps 4 and 5 came after the last checkpoint
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path / "cut", range(4, 11), 3)
    assert metrics_of(tmp_path / "cut" / "metrics.jsonl") == metrics_of(tmp_path / "whole" / "metrics.jsonl")
    write(tmp_path / "cut", range(0), 0)
    assert read_lines(tmp_path / "cut" / "metrics.jsonl") == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CannotWrite) as caught:
            sink.write(1, {})
    assert str(caught.value).endswith("metrics.jsonl: No space left on device. Make room or fix the permissions")
    assert caught.value.errno == errno.ENOSPC
    sink.close()
    sink.close()
    with pytest.raises(CannotWrite, match=r"cannot write .*metrics\.jsonl: No such file"):
        JsonlSink(tmp_path / "nowhere" / "metrics.jsonl")


def test_a_disk_that_takes_a_part_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, data[:7]))
        sink.write(1, {"value": 2.0})
    sink.close()
    assert metrics_of(tmp_path / "metrics.jsonl") == [(1, {"value": 2.0})]


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite):
        write_atomic(path, "new")
    cut_after(tmp_path / "none.jsonl", 3)  # what is not there needs no cut
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_atomic_write_follows_no_link_in_the_place_of_its_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    (tmp_path / "other").write_text("of somebody")
    (tmp_path / f".file.txt.{os.getpid()}.tmp").symlink_to(tmp_path / "other")
    write_atomic(path, "new")
    assert path.read_text() == "new" and (tmp_path / "other").read_text() == "of somebody"


# --- TensorBoard, Weights & Biases, MLflow ---------------------------------------------------------------------------


def test_tensorboard_has_the_finite_values(tmp_path: Path) -> None:
    with Sinks(SinkConfig(), tmp_path, warn=fail) as sinks:
        sinks.write(1, {"collect/success": 0.25, "policy/kl": math.nan})
        sinks.write(2, {"collect/success": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["collect/success"]
    assert [(e.step, e.value) for e in events.Scalars("collect/success")] == [(1, 0.25), (2, 0.5)]


def test_what_is_not_installed_is_refused_or_where_nobody_asked_for_it_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    check_sinks(SinkConfig())
    with Sinks(SinkConfig(), tmp_path, warn=said.append) as sinks:
        sinks.write(1, {})
        sinks.write(2, {})
    assert len(said) == 1 and said[0].startswith("tensorboard ")
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"monitor.sinks.{name} is true, but .* not installed: pip install"):
            check_sinks(SinkConfig.model_validate({name: True}))


class FakeWandb:
    """A fake of wandb that accepts a number of steps and then fails."""

    def __init__(self, good: int) -> None:
        self.good, self.logged, self.finished, self.asked = good, [], False, {}  # type: ignore[var-annotated]

    def init(self, **asked: Any) -> "FakeWandb":
        self.asked = asked
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        if step > self.good:
            raise ConnectionError("the network is down")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


def test_a_sink_that_fails_warns_once_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb(good=2)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    said: list[str] = []
    config = SinkConfig(tensorboard=False, wandb=True, project="lakes")
    with Sinks(config, tmp_path, warn=said.append, run_id="abc", run_config={"seed": 1}) as sinks:
        for step in range(1, 6):
            sinks.write(step, {"value": float(step), "none": math.nan})
    assert wandb.logged == [(1, {"value": 1.0}), (2, {"value": 2.0})]
    assert len(said) == 1 and "wandb failed at step 3" in said[0] and "the network is down" in said[0]
    assert wandb.asked["id"] == "abc" and wandb.asked["project"] == "lakes" and wandb.asked["config"] == {"seed": 1}
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 5


@pytest.mark.parametrize(
    "name",
    ['criteria/option: 8" (20 cm)', "pass@4", "größe/café 5%", "a//b", "/a", "a/./b/..", "x/" + "long " * 80, "a\n"],
)
def test_names_of_metrics_are_such_as_mlflow_takes(name: str) -> None:
    taken = _mlflow_name(name)
    # The rules of mlflow.utils.validation; older versions refuse a colon.
    assert re.fullmatch(r"[/\w.\- ]+", taken) and len(taken) <= 250
    assert posixpath.normpath(taken) == taken and not taken.startswith(("/", ".."))
    assert _mlflow_name("loss/policy-mean 0.5") == "loss/policy-mean 0.5"


def test_mlflow_gets_experiment_run_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    fake = SimpleNamespace(
        set_experiment=lambda name: calls.append(("experiment", name)),
        start_run=lambda **asked: calls.append(("run", asked)),
        log_dict=lambda value, file: calls.append(("config", value)),
        log_metrics=lambda metrics, step: calls.append(("metrics", (step, metrics))),
        end_run=lambda: calls.append(("end", None)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    config = SinkConfig(tensorboard=False, mlflow=True)
    with Sinks(config, tmp_path, warn=fail, run_id="abc", run_config={"seed": 1}) as sinks:
        sinks.write(3, {"eval/pass@4": 0.5})
    assert [name for name, _ in calls] == ["experiment", "run", "config", "metrics", "end"]
    assert calls[3][1] == (3, {"eval/pass_at_4": 0.5})
