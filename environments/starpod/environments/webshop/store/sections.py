"""Arrays as files with checksums. They are mapped read-only, so that all processes of a machine share the memory."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from starpod.env_server import Unavailable


class StoreError(Unavailable):
    """A store cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StoreSection:
    """Description of one array of a store: little-endian dtype, shape, size in bytes, SHA-256 of the bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoreSection:
        """Parse a section. Raises ValueError, TypeError or KeyError if it is malformed or inconsistent."""
        section = cls(str(value["dtype"]), tuple(value["shape"]), int(value["bytes"]), str(value["sha256"]))
        if np.dtype(section.dtype).itemsize * int(np.prod(section.shape, dtype=np.int64)) != section.bytes:
            raise ValueError("the size does not follow from dtype and shape")
        return section


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a section."""
    return folder / f"{name}.bin"


class SectionWriter:
    """A writer of a section in pieces, to use as a context manager. `section` is available afterwards."""

    section: StoreSection

    def __init__(self, folder: Path, name: str) -> None:
        self.size = 0
        self._path = path_of(folder, name)
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    def __enter__(self) -> SectionWriter:
        self._file = self._path.open("wb", buffering=1 << 20)
        return self

    def write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        self._file.close()
        if kind is None:
            self.section = StoreSection("|u1", (self.size,), self.size, self._hash.hexdigest())


def write_array(folder: Path, name: str, array: np.ndarray) -> StoreSection:
    """Write an array as a section."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = array.data.cast("B") if array.size else memoryview(b"")
    path_of(folder, name).write_bytes(data)
    return StoreSection(array.dtype.str, array.shape, array.nbytes, hashlib.sha256(data).hexdigest())


def make_lasting(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def map_section(folder: Path, name: str, section: StoreSection) -> np.ndarray:
    """Map the array of a section read-only. Raises StoreError if its file is missing or has another size."""
    path = path_of(folder, name)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != section.bytes:
                kind = "cut short" if size < section.bytes else "too long"
                raise StoreError(f"{path} is {kind}: it has {size} bytes instead of {section.bytes}; build it again")
            if not size:
                return np.empty(section.shape, section.dtype)
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; build the store again") from error
    return np.frombuffer(memory, section.dtype).reshape(section.shape)


def check_section(folder: Path, name: str, section: StoreSection) -> None:
    """Read a whole section and compare its checksum. Raises StoreError if it differs."""
    array = map_section(folder, name, section)
    data = array.data.cast("B") if array.size else b""
    if hashlib.sha256(data).hexdigest() != section.sha256:
        raise StoreError(f"{path_of(folder, name)} was changed since it was built; build the store again")


def write_json(path: Path, value: Mapping[str, Any], *, lasting: bool = False) -> None:
    """Write a JSON file atomically, with a checksum. `lasting` also flushes it to the disk."""
    data = json.dumps({**value, "checksum": checksum(value)}, indent=1, sort_keys=True).encode()
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(data)
    if lasting:
        make_lasting(temporary)
    temporary.replace(path)
    if lasting:
        make_lasting(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote. Raises OSError, or ValueError if it is damaged or of another kind."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict) or value.pop("checksum", None) != checksum(value):
        raise ValueError("its checksum is wrong")
    return value


def checksum(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
