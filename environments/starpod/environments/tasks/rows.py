"""Rows of a file: JSON Lines, CSV, Parquet, or a folder that `save_to_disk` of the package datasets wrote."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starpod.env_server import read_untrusted_json

MAX_ROW_BYTES = 2**20
"""Maximum number of bytes of a line."""


class BadRow(ValueError):
    """A row or a file that cannot be used. The message begins with the file, and the line if there is one."""


def open_rows(path: Path) -> JSONLines | ArrowRows:
    """Open a file or folder, to scan its rows once and then to read each by its index. Raises BadRow and OSError."""
    return JSONLines(path) if path.suffix == ".jsonl" else ArrowRows(path)


class JSONLines:
    """A file of JSON Lines. It keeps the position of each row in memory, 8 bytes, and reads a row when it is played."""

    def __init__(self, path: Path) -> None:
        self._name, self._file = path.name, path.open("rb")
        self._ends = array("q", (0,))

    def scan(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the columns of each row with its place, such as `tasks.jsonl:3`. Raises BadRow."""
        number = end = 0
        while line := self._file.readline(MAX_ROW_BYTES + 1):
            number, end = number + 1, end + len(line)
            if line.strip():
                try:
                    if len(line) > MAX_ROW_BYTES:
                        raise ValueError("the line has more than 1 MiB")
                    values = read_untrusted_json(line.decode("utf-8-sig"))
                    if not isinstance(values, dict):
                        raise ValueError('it is not an object: write {"prompt": ..., "answer": ...}')
                except ValueError as error:
                    raise BadRow(f"{self._name}:{number}: no JSON in UTF-8 on one line: {error}") from None
                self._ends.append(end)
                yield f"{self._name}:{number}", _present(values)

    def read(self, index: int) -> dict[str, Any]:
        """Return the columns of a row. It may be called on several threads."""
        start, end = self._ends[index : index + 2]
        return _present(read_untrusted_json(os.pread(self._file.fileno(), end - start, start).decode("utf-8-sig")))


class ArrowRows:
    """Tables of pyarrow: CSV and Parquet are read into memory, the Arrow files of a folder are mapped into it."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
        except ModuleNotFoundError as error:
            raise BadRow(f"{path.name} needs the package pyarrow: pip install pyarrow") from error
        self._name = path.name
        try:
            self._tables = _read_tables(path)
        except (pa.ArrowException, LookupError, ValueError) as error:
            raise BadRow(f"{path.name}: {' '.join(str(error).split())[:300]}") from None

    def scan(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for split, table in self._tables:
            name = f"{self._name}/{split}" if split else self._name
            rows = (row for batch in table.to_batches(max_chunksize=256) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{name}: row {number}", _present(row, split)

    def read(self, index: int) -> dict[str, Any]:
        for split, table in self._tables:
            if index < table.num_rows:
                return _present(table.slice(index, 1).to_pylist()[0], split)
            index -= table.num_rows
        raise IndexError(index)


def _read_tables(path: Path) -> list[tuple[str, Any]]:
    """Return tables, each with the name of its split or ""."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.suffix == ".parquet":
        return [("", parquet.read_table(path, memory_map=True))]
    if path.suffix == ".csv":
        parse = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(path, parse_options=parse) as reader:
            names = reader.schema.names
        texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
        return [("", csv.read_csv(path, parse_options=parse, convert_options=texts))]
    if (splits := path / "dataset_dict.json").is_file():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        return [(name, table) for name in names for _, table in _read_tables(path / name)]
    files = json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]
    parts = [pa.ipc.open_stream(pa.memory_map(str(path / file["filename"]))).read_all() for file in files]
    return [("", pa.concat_tables(parts))]


def _present(row: dict[str, Any], split: str = "") -> dict[str, Any]:
    """Return the columns that have a value, with the name of the folder as split."""
    return {name: value for name, value in row.items() if value is not None} | ({"split": split} if split else {})
