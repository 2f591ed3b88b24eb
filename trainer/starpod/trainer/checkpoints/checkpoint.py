"""Checkpoints: the complete state of a run, in folders that are either whole or absent.

    checkpoints/step-00000025/   manifest.json   size and SHA-256 of every other file, the step, the score
                                 state.json      everything that is not a tensor
                                 model.safetensors, optimizer.safetensors, ...
    checkpoints/latest, best     the name of a folder, for people and scripts; `Checkpoints` does not read them

A folder is written under a temporary name, synced to disk, and renamed. If the process is killed in between, the
earlier checkpoints are unchanged. No file format that can run code is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from starpod.trainer.checkpoints.config import CheckpointConfig
from starpod.trainer.checkpoints.folders import folder_name, list_checkpoints
from starpod.trainer.checkpoints.tensors import TensorFile
from starpod.trainer.parallel.ranks import Parallel, RankFailed

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TEMPORARY = ".temporary-"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
Score = tuple[float, float]
"""Success (0 if it is not reported) and mean return of an evaluation. The highest is the best."""

logger = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint could not be written or read. The message says which one, why, and which ones are still usable."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was read: tensors on the CPU, and values as JSON returns them (tuples become lists).

    Tensors are memory-mapped, so only the parts that are used are read from the file.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path
    score: Score | None = None

    def check_finite(self) -> None:
        """Raise CheckpointError if a tensor contains NaN or infinity."""
        for file, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise CheckpointError(
                        f"the checkpoint {self.path} cannot be used: {name} of its {file} holds NaN or infinite "
                        "values, so training had diverged; remove its folder to use the checkpoint before it"
                    )


@dataclass(frozen=True, slots=True)
class StateCopy:
    """This rank's copy of the state of a run. Training may continue while it is written."""

    step: int
    files: dict[str, TensorFile]
    state: bytes
    score: Score | None


class Checkpoints:
    """The checkpoints of one run. Only one run may write them; any number of processes may read.

    Args:
        parallel: The ranks that write together. They exchange objects in the thread that writes, so they need their own
            process group.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        *,
        parallel: Parallel | None = None,
    ) -> None:
        self.folder = folder
        self._parallel = parallel or Parallel()
        self.config = config or CheckpointConfig()

    # --- writing -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        score: Score | None = None,
    ) -> Path:
        """Take a snapshot and write it; see `snapshot` and `write`.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        return self.write(self.snapshot(step, tensors, state, score=score))

    def snapshot(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        score: Score | None = None,
    ) -> StateCopy:
        """Copy the state after iteration `step` to main memory. Each rank copies its part of sharded tensors.

        Args:
            step: Number of finished iterations.
            tensors: Tensors by file name without extension, then by tensor name. Tied tensors are stored once.
            state: JSON values with text keys; only rank 0's are saved.
            score: Success and mean return of the evaluation. The checkpoint with the highest score is the best.
        """
        _check_keys("state", state)
        if bad_names := [name for name in tensors if not _NAME.fullmatch(name)]:
            raise ValueError(f"tensors are named in lower-case letters, digits and _: {bad_names[0]!r} is not")
        is_main = self._parallel.is_main
        files = {name: TensorFile.copied(file_tensors, is_main=is_main) for name, file_tensors in tensors.items()}
        return StateCopy(step, files, json.dumps(state).encode() if is_main else b"", score)

    def write(self, snapshot: StateCopy) -> Path:
        """Write a snapshot, remove surplus checkpoints, and return the new folder. All ranks take part.

        Checkpoints of later steps are removed as well. They exist if the run went back to an earlier step.

        Raises:
            CheckpointError: The disk is full or not writable. Earlier checkpoints are then unchanged.
        """
        do_together = self._parallel.do_together
        try:
            temporary = do_together(lambda: self._begin(snapshot))[0]
            try:
                do_together(lambda: _write_parts(snapshot, temporary))
                return do_together(lambda: self._finish(snapshot, temporary))[0]
            except BaseException:
                if self._parallel.is_main:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
        except (OSError, RankFailed) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} could not be saved in {self.folder}: {_reason(error)}; "
                f"{_free_space(self.folder)}earlier checkpoints are untouched"
            ) from error

    def _begin(self, snapshot: StateCopy) -> Path:
        """Create a temporary folder with files for all ranks to fill. Return it on rank 0, an empty path elsewhere."""
        if not self._parallel.is_main:
            return Path()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        temporary = self.folder / (TEMPORARY + self._unused(snapshot.step).name)
        try:
            temporary.mkdir()
            for name, file in snapshot.files.items():
                file.create(temporary / f"{name}.safetensors")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return temporary

    def _finish(self, snapshot: StateCopy, temporary: Path) -> Path:
        """Write the manifest and rename the folder to its final path on rank 0. Return that path on all ranks."""
        folder = self.folder / temporary.name.removeprefix(TEMPORARY)
        if not self._parallel.is_main:
            return folder
        _seal_folder(temporary, snapshot)
        os.rename(temporary, folder)
        _sync(self.folder)
        paths = self._surplus(folder)
        marks = {"latest": folder, "best": _best(self._newest_first(without=paths))}
        for name, target in marks.items():
            if target is not None:
                _replace(self.folder, self.folder / name, f"{target.name}\n".encode())
        for path in paths:
            self._remove(path)
        return folder

    def clean(self) -> None:
        """Remove incomplete folders that a killed process left."""
        for path in self.folder.glob(TEMPORARY + "*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # on NFS, files that a process still reads remain for a while
            else:
                path.unlink()

    def _unused(self, step: int) -> Path:
        """Return an unused path for a step. An older folder of the step is kept until the new one is complete."""
        number = 1
        while (path := self.folder / folder_name(step, number)).exists():
            number += 1
        return path

    def _surplus(self, saved: Path) -> list[Path]:
        """Return the checkpoints to remove once `saved` is written."""
        newest_first = list_checkpoints(self.folder)
        steps: dict[int, Path] = {}
        for checkpoint in newest_first[[checkpoint.path for checkpoint in newest_first].index(saved) :]:
            steps.setdefault(checkpoint.step, checkpoint.path)  # the last one saved at each step
        paths = list(steps.values())
        kept_paths = {*paths[: self.config.keep], _best(paths) if self.config.keep_best else None}
        return [checkpoint.path for checkpoint in newest_first if checkpoint.path not in kept_paths]

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint, then delete it. A half-deleted folder is therefore never mistaken for a checkpoint."""
        new_path = self.folder / (TEMPORARY + "removed-" + path.name)
        os.rename(path, new_path)
        shutil.rmtree(new_path, ignore_errors=True)  # `clean` tries again: the new checkpoint is complete

    def forget_scores(self) -> None:
        """Remove the scores of all checkpoints, because the task of evaluations has changed. Raises OSError."""
        for path in _scores(self._newest_first()):
            manifest = {key: value for key, value in _read_manifest(path).items() if key != "sha256"}
            _replace(self.folder, path / MANIFEST, _sealed({**manifest, "score": None}))
        (self.folder / "best").unlink(missing_ok=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    def latest(self, names: Collection[str] | None = None) -> Loaded | None:
        """Return the newest usable checkpoint, or None if there is no checkpoint.

        names: see `load_checkpoint`. Damaged checkpoints are reported and skipped. Raises CheckpointError if all are
        damaged.
        """
        return self._first_usable(self._newest_first(), names)

    def best(self, names: Collection[str] | None = None) -> Loaded | None:
        """Return the usable checkpoint with the highest score, or None if none has a score. See `latest`.

        If several have the same score, the newest one is returned.
        """
        scores = _scores(self._newest_first())
        return self._first_usable(sorted(scores, key=lambda path: scores[path], reverse=True), names)

    def _newest_first(self, without: Collection[Path] = ()) -> list[Path]:
        return [checkpoint.path for checkpoint in list_checkpoints(self.folder, without)]

    def _first_usable(self, paths: list[Path], names: Collection[str] | None) -> Loaded | None:
        errors: list[str] = []
        for path in paths:
            try:
                return load_checkpoint(path, names)
            except CheckpointError as error:
                errors.append(str(error))
                if path != paths[-1]:
                    logger.warning("%s; the next one is tried", error)
        if errors:
            raise CheckpointError(f"no checkpoint in {self.folder} can be used: {'; '.join(errors)}")
        return None


def load_checkpoint(path: Path, names: Collection[str] | None = None) -> Loaded:
    """Read one folder, and verify all bytes against its manifest.

    names: names of the tensor files to read; None: all. Raises CheckpointError if the folder is damaged or is not a
    checkpoint.
    """
    try:
        manifest = _read_manifest(path)
        files: Mapping[str, Mapping[str, Any]] = manifest["files"]
        _check(path / STATE, files[STATE])
        state = json.loads((path / STATE).read_bytes())
        tensors = {}
        for name, ties in manifest["tensors"].items():
            if names is None or name in names:
                file = f"{name}.safetensors"
                _check(path / file, files[file])
                with safetensors.safe_open(path / file, "pt") as reader:
                    stored = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
                tensors[name] = stored | {tied_name: stored[stored_name] for tied_name, stored_name in ties.items()}
    except _Damaged as error:
        raise CheckpointError(f"the checkpoint {path} cannot be used: {error}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be used: {_reason(error)}") from error
    return Loaded(manifest["step"], tensors, state, path, as_score(manifest["score"]))


# --- one folder -------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """A file is damaged. The message says how."""


def _write_parts(snapshot: StateCopy, folder: Path) -> None:
    for name, file in snapshot.files.items():
        file.write_parts(folder / f"{name}.safetensors")


def _seal_folder(folder: Path, snapshot: StateCopy) -> None:
    """Write the state and the manifest beside the tensors."""
    _write(folder / STATE, snapshot.state)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in sorted(folder.iterdir())}
    ties = {name: file.ties for name, file in snapshot.files.items()}
    manifest = {"format": FORMAT, "step": snapshot.step, "score": snapshot.score, "tensors": ties, "files": files}
    _write(folder / MANIFEST, _sealed(manifest))
    _sync(folder)


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest with its own digest, in canonical JSON."""
    text = json.dumps(manifest, sort_keys=True, allow_nan=False)
    return json.dumps(
        {**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True, indent=1
    ).encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise _Damaged(f"it has no {MANIFEST}")
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        sealed_data = _sealed({key: value for key, value in manifest.items() if key != "sha256"})
    except (ValueError, AttributeError) as error:
        raise _Damaged(f"its {MANIFEST} is damaged") from error
    if sealed_data != data:
        raise _Damaged(f"its {MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise _Damaged(f"it has format {manifest['format']}, this version of Starpod reads {FORMAT}")
    return dict(manifest)


def _check(path: Path, expected: Mapping[str, Any]) -> None:
    """Raise _Damaged unless the file has the expected size and digest."""
    if not path.is_file():
        raise _Damaged(f"{path.name} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise _Damaged(f"{path.name} has {size} bytes, but its manifest says {expected['bytes']}")
    if _digest(path) != expected["sha256"]:
        raise _Damaged(f"{path.name} is damaged: its digest differs from the manifest's")


def _scores(folders: Iterable[Path]) -> dict[Path, Score]:
    """Return the scores of the readable checkpoints that have a score."""
    scores = {}
    for folder in folders:
        with contextlib.suppress(OSError, _Damaged):
            if (score := as_score(_read_manifest(folder)["score"])) is not None:
                scores[folder] = score
    return scores


def as_score(value: Any) -> Score | None:
    """Return a score, or None, that was read from JSON."""
    return None if value is None else (value[0], value[1])


def _best(newest_first: list[Path]) -> Path | None:
    scores = _scores(newest_first)
    return max(scores, key=lambda path: scores[path], default=None)  # the newest if several are best


# --- files ------------------------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(folder: Path, path: Path, data: bytes) -> None:
    """Replace a file atomically. Its temporary file is in the folder of checkpoints, where `clean` removes it."""
    temporary = folder / (TEMPORARY + path.name)
    _write(temporary, data)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB are free there; "
    except OSError:
        return ""


def _check_keys(where: str, value: Any) -> None:
    """Raise TypeError for a key that is not text. JSON would silently turn it into text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys of a checkpoint's state are text")
            _check_keys(f"{where}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(where, item)
