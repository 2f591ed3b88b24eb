"""Sinks of metrics: metrics.jsonl always; TensorBoard, Weights & Biases and MLflow if configured."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.output.config import SinkConfig
from starpod.trainer.output.files import CannotWrite, cut_after, to_json_line


class Sink(Protocol):
    """Receiver of the metrics of each step, in order."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. All values are finite."""

    def close(self) -> None: ...


class JsonlSink:
    """The file metrics.jsonl: one object per step, {"step", "time", "metrics", "warnings"}, flushed after each.

    time: seconds since 1970. warnings: warnings of this step; the key is missing if there are none.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """Open the file for appending. resumed_step: remove lines of later steps, which will be computed again."""
        self._path = path
        if resumed_step is not None:
            cut_after(path, resumed_step)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise CannotWrite(path, error) from error

    def write(self, step: int, metrics: Mapping[str, float], warnings: Sequence[str] = ()) -> None:
        """Append a line. Raises CannotWrite; the line may then be incomplete, and the next resumption removes it."""
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "metrics": metrics}
        if warnings:
            line["warnings"] = list(warnings)
        unwritten = memoryview(to_json_line(line).encode())
        try:
            while unwritten:  # a nearly full disk may write only a part
                unwritten = unwritten[os.write(self._file, unwritten) :]
        except OSError as error:
            raise CannotWrite(self._path, error) from error

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class TensorBoardSink:
    """Sink to TensorBoard files in a folder. TensorBoard itself purges steps after the resumed one."""

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer = tensorboard.SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Sink to Weights & Biases. `run_id` joins a resumed run to its first part."""

    def __init__(self, folder: Path, *, project: str, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project, name=name, id=run_id, dir=str(folder), config=dict(config), resume="allow"
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Sink to the MLflow server at MLFLOW_TRACKING_URI. A resumed run is a separate run with the same tag."""

    def __init__(self, *, project: str, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name, tags={"starpod.run": run_id})
        self._mlflow.log_dict(dict(config), "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow refuses a whole step for other characters in a name.
        self._mlflow.log_metrics({_mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow allows: of few characters, at most 250 of them, and a path in its shortest form."""
    safe = re.sub(r"[^\w /.-]", lambda match: "_at_" if match[0] == "@" else f"_{ord(match[0]):x}_", name)
    safe = "/".join(part if part.strip(".") else f"_{part}" for part in safe.split("/"))
    return safe if len(safe) <= 250 else f"{safe[:233]}_{hashlib.sha256(safe.encode()).hexdigest()[:16]}"


def check_sinks(config: SinkConfig) -> None:
    """Raise ConfigError if a configured sink's package is not installed."""
    for name in ("wandb", "mlflow"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"monitor.sinks.{name} is true, but the package {name} is not installed: pip install {name}, or "
                "leave out that key"
            )


class Sinks:
    """All sinks of a run. If metrics.jsonl fails, the run stops; any other sink that fails is dropped with a warning.

    warn: called with the text of each warning.
    """

    def __init__(
        self,
        config: SinkConfig,
        folder: Path,
        *,
        warn: Callable[[str], None],
        run_id: str = "",
        run_config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        self._warn = warn
        self._jsonl = JsonlSink(folder / "metrics.jsonl", resumed_step=resumed_step)
        self._others: dict[str, Sink] = {}
        name, settings = folder.resolve().name, run_config or {}
        if config.tensorboard:
            self._add("tensorboard", lambda: TensorBoardSink(folder / "tensorboard", resumed_step=resumed_step))
        if config.wandb:
            self._add(
                "wandb",
                lambda: WandbSink(folder, project=config.project, name=name, run_id=run_id, config=settings),
            )
        if config.mlflow:
            self._add("mlflow", lambda: MlflowSink(project=config.project, name=name, run_id=run_id, config=settings))

    def write(self, step: int, metrics: Mapping[str, float], warnings: Sequence[str] = ()) -> None:
        """Write the metrics to all sinks.

        Args:
            metrics: Metrics by name. Infinite and undefined values are written to metrics.jsonl only.

        Raises:
            CannotWrite: metrics.jsonl cannot be written.
        """
        self._jsonl.write(step, metrics, warnings)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for name, sink in list(self._others.items()):
            try:
                sink.write(step, finite)
            except Exception as error:  # a third-party logger must not stop training
                del self._others[name]
                self._warn(
                    f"{name} failed at step {step} and gets no more metrics: {error}. metrics.jsonl has them all"
                )

    def close(self) -> None:
        """Close all sinks. May be called repeatedly."""
        self._jsonl.close()
        while self._others:
            name, sink = self._others.popitem()
            try:
                sink.close()
            except Exception as error:
                self._warn(f"{name} could not be closed: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._others[name] = make()
        except ModuleNotFoundError as error:
            # TensorBoard is on by default, so a missing package is a warning; `check_sinks` refuses the others.
            self._warn(f"{name} gets no metrics: the package {error.name} is not installed")
        except Exception as error:
            self._warn(f"{name} gets no metrics: {error}")
