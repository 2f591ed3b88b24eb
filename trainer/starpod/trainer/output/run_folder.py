"""The folder of one run: its configuration, the code's version, and all results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starpod.trainer.checkpoints.folders import list_checkpoints, marks_of
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.yaml12 import dump_yaml, load_yaml
from starpod.trainer.data.untrusted import MAX_LINE, read_bytes, read_json
from starpod.trainer.output.episode_folder import EpisodeFolder
from starpod.trainer.output.files import (
    CannotWrite,
    FolderLocked,
    cut_after,
    hold_lock,
    read_lines,
    to_json_line,
    write_atomic,
)
from starpod.trainer.output.words import missing_result

PACKAGES = "starpod torch transformers tokenizers numpy grpcio protobuf peft vllm".split()
"""Packages whose versions are recorded if they are installed."""


class RunExists(ConfigError):
    """A run would overwrite what the folder contains: another run, or a user's config.yaml."""


class RunLocked(Exception):
    """Another process is training in the folder."""


class RunFolder:
    """Paths and files of one run.

    path/config.yaml         the configuration as resolved
    path/run.json            id, title, code (git), versions, platform, changes from the defaults, how the run ended
    path/metrics.jsonl       one object per step, written by `Sinks`
    path/evaluations.jsonl   one object per evaluation on the selection seeds
    path/final.json          the best checkpoint on the final seeds, once the run is over
    path/episodes/           eval-000050.jsonl: episodes of the evaluation at step 50
                             final-000050.jsonl: episodes of the final evaluation, with the checkpoint of step 50
                             train-000050.jsonl.gz: episodes collected in step 50, for the newest steps
                             train-000050.update.gz: what the update did with them
    path/pictures.zip        frames of some of these episodes
    path/checkpoints/        written by `Checkpoints`
    path/report.html         the page for people
    path/notes.json          tags and a note, written by people through the live site
    path/.live.json          while it trains: its phase and servers, and its sessions in play while .watched is
        touched
    """

    def __init__(self, path: Path) -> None:
        """Open an existing folder. Use `create` for a new one."""
        self.path = path
        self.config = path / "config.yaml"
        self.facts = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.final = path / "final.json"
        self.episodes = EpisodeFolder(path / "episodes")
        self.checkpoints = path / "checkpoints"
        self.pictures = path / "pictures.zip"
        self.report = path / "report.html"
        self.notes = path / "notes.json"
        self.live_status = path / ".live.json"
        self.watch_mark = path / ".watched"
        self._created_folders: list[Path] = []

    @classmethod
    def create(cls, path: Path | str, *, resume: bool = False) -> RunFolder:
        """Create the folder. Existing content stays unchanged.

        Args:
            resume: Accept a folder that contains a run, as well as one that does not. The same command line therefore
                works for the first start and for every restart.

        Raises:
            RunExists: See `expect_room`.
            CannotWrite: The folder cannot be created.
        """
        folder = cls(Path(path))
        folder.expect_room(resume=resume)
        folders = (*reversed(folder.path.parents), folder.path, folder.episodes.path, folder.checkpoints)
        folder._created_folders = [directory for directory in folders if not directory.exists()]
        try:
            for directory in folders:
                directory.mkdir(exist_ok=True)
        except OSError as error:
            raise CannotWrite(folder.path, error) from error
        return folder

    def expect_room(self, *, resume: bool) -> None:
        """Raise RunExists if the folder contains a run and `resume` is false, or a config.yaml that no run wrote."""
        if self.config.exists() and not (self.exists or self.facts.exists()):
            raise RunExists(
                f"{self.config} is not of a run, because there is no {self.facts.name} beside it, and a run would "
                "overwrite it: choose another folder with --run-dir"
            )
        if self.exists and not resume:
            raise RunExists(
                f"{self.path} holds a run already. Continue it with --resume, or choose another folder with "
                "--run-dir; nothing is overwritten"
            )

    def begin(
        self,
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        defaults: Mapping[str, Any] | None = None,
        title: str = "",
        model: str = "",
        files: Mapping[str, str] | None = None,
    ) -> RunFolder:
        """Write config.yaml and run.json, and return this folder.

        Args:
            resume: Keep the facts of the run in the folder, and add this start with its changes. Otherwise they are
                those of a start that failed at once, and are replaced.
            defaults: The default configuration. The report shows the differences.
            model: Description of the initial model.
            files: Digests of the user's files by path.

        Raises:
            CannotWrite: A file cannot be written.
        """
        start: dict[str, Any] = {
            "time": round(time.time(), 3),
            "command": sys.argv,
            "git": git_state(Path(__file__).parent),
            "packages": package_versions(),
            "platform": platform_facts(),
        }
        if resume and (facts := self.read_facts()):
            changes = differences(config, self.read_config())
            facts["resumed"] = [*facts.get("resumed", []), {**start, "changed": changes}]
            facts.pop("ended", None)
        else:
            facts = {"id": uuid.uuid4().hex[:12], "title": title, "model": model, **start}
        facts["files"] = files or {}
        facts["differs_from_defaults"] = differences(config, defaults) if defaults is not None else None
        self._write_facts(facts)  # first: without it, config.yaml counts as the user's
        write_atomic(self.config, dump_yaml(dict(config)))
        return self

    @property
    def exists(self) -> bool:
        """Whether the folder contains results or a checkpoint of a run. A start that failed at once leaves neither."""
        has_checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return has_checkpoints or self.metrics.exists() or self.evaluations.exists()

    @property
    def started(self) -> bool:
        """Whether a run was started in this folder, even if it ended at once."""
        return self.exists or self.config.exists() or self.checkpoints.is_dir()

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint `best`; None before the first evaluation was saved."""
        marks, folders = marks_of(self.checkpoints), list_checkpoints(self.checkpoints)
        return next((checkpoint.step for checkpoint in folders if "best" in marks.get(checkpoint.name, ())), None)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other trainers. The lock of a killed process is released. Raises RunLocked.

        If only the files of `begin` exist when the lock is released, the folders from `create` are removed. A refused
        start therefore leaves no trace.
        """
        try:
            with hold_lock(self.path):
                try:
                    yield
                finally:
                    self._remove_unused()
        except FolderLocked as error:
            raise RunLocked(
                f"another trainer ({error}) works in {self.path}: wait for it, stop it, or choose another folder with "
                "--run-dir"
            ) from None

    def _remove_unused(self) -> None:
        own_files = {self.path / ".lock", self.config, self.facts, self.watch_mark}
        files = {path for path in self.path.rglob("*") if not path.is_dir()}
        if self.path in self._created_folders and files <= own_files:
            with contextlib.suppress(OSError):  # another process wrote something meanwhile
                for file in files:
                    file.unlink()
                for created in reversed(self._created_folders):
                    created.rmdir()

    @property
    def id(self) -> str:
        """Unique id of the run. It stays the same after a resumption."""
        return str(self.read_facts()["id"])

    def read_config(self) -> dict[str, Any]:
        return dict(load_yaml(self.config.read_text(encoding="utf-8"))) if self.config.exists() else {}

    def read_facts(self) -> dict[str, Any]:
        """Return the values of run.json; empty without that file."""
        return dict(json.loads(self.facts.read_text(encoding="utf-8"))) if self.facts.exists() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.metrics)

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations, except those without a result because half of their episodes failed."""
        return [line for line in read_lines(self.evaluations) if not missing_result(line)]

    def append_evaluation(self, summary: Mapping[str, Any]) -> None:
        """Write a line to evaluations.jsonl, replacing lines of the same and later steps. Raises CannotWrite.

        An evaluation that is repeated after a crash therefore appears once.
        """
        earlier_lines = [line for line in read_lines(self.evaluations) if line["step"] < summary["step"]]
        write_atomic(self.evaluations, "".join(to_json_line(line) for line in [*earlier_lines, summary]))

    def read_final(self) -> dict[str, Any] | None:
        """Return the final evaluation, or None before it."""
        try:
            return dict(read_json(read_bytes(self.final, MAX_LINE)))
        except FileNotFoundError:
            return None

    def write_final(self, summary: Mapping[str, Any]) -> None:
        """Write final.json. Raises CannotWrite."""
        write_atomic(self.final, to_json_line(summary))

    def cut_after(self, step: int) -> None:
        """Remove what was written after a step, to restore the folder of that step's checkpoint.

        The final evaluation is removed as well, because the run is no longer over. The sink cuts metrics.jsonl.
        """
        cut_after(self.evaluations, step)
        self.final.unlink(missing_ok=True)
        self.episodes.cut_after(step)

    def end(self, outcome: str, *, seconds: float, limits: Sequence[str] = ()) -> None:
        """Record in run.json how the run ended.

        Args:
            seconds: Duration, including earlier parts.
            limits: Keys of `stop` whose limits were reached.
        """
        ended = {"outcome": outcome, "seconds": seconds, "time": time.time(), "limits": list(limits)}
        self._write_facts({**self.read_facts(), "ended": ended})

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        write_atomic(self.facts, json.dumps(facts, indent=2, default=str) + "\n")


def differences(config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Map each dotted key that differs to [value, default].

    Args:
        config, defaults: Nested mappings to compare. A missing key counts as None.
        prefix: Written before each key, such as "model.".
    """
    changes: dict[str, list[Any]] = {}
    for key in [*config, *(key for key in defaults if key not in config)]:
        value, default = config.get(key), defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            changes |= differences(value, default, f"{prefix}{key}.")
        elif value != default:
            changes[f"{prefix}{key}"] = [value, default]
    return changes


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the repository that tracks a folder, or None if none does."""

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return process.stdout.strip()

    try:
        # Check that git tracks the folder, because a package may be installed inside an unrelated repository.
        if not git("ls-files", "."):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages in PACKAGES."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def platform_facts() -> dict[str, Any]:
    """Return facts about the machine, system, interpreter and GPUs."""
    import torch  # a local import, because reading a run folder does not need torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpus": gpus,
    }
