"""Rows of a file: JSON Lines, CSV, Parquet, or a folder that `save_to_disk` of the package datasets wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from starpod.env_server import read_untrusted_json

ReadRow = Callable[[], dict[str, Any]]
"""Function that returns the columns of a row that have a value. It may be called on several threads."""


class BadRow(ValueError):
    """A row or a file that cannot be used. The message begins with the file, and the line if there is one."""


def open_rows(path: Path) -> Iterator[tuple[str, ReadRow]]:
    """Yield each row with its place, such as `tasks.jsonl:3`. Raises BadRow and OSError.

    Lines of JSON, CSV and Parquet are kept in memory; the Arrow files of a folder are mapped into it.
    """
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path.name}:{number}", partial(_parse_line, line)
        return
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise BadRow(f"{path.name} needs the package pyarrow: pip install pyarrow") from error
    try:
        tables = _read_tables(path)
    except (pa.ArrowException, LookupError, ValueError) as error:
        raise BadRow(f"{path.name}: {' '.join(str(error).split())[:300]}") from None
    for split, table in tables:
        name = f"{path.name}/{split}" if split else path.name
        for index in range(table.num_rows):
            yield f"{name}: row {index + 1}", partial(_read_row, table, index, split)


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        values = read_untrusted_json(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"no JSON in UTF-8 on one line: {error}") from None
    if not isinstance(values, dict):
        raise ValueError('it is not an object: write {"prompt": ..., "answer": ...}')
    return {name: value for name, value in values.items() if value is not None}


def _read_row(table: Any, index: int, split: str) -> dict[str, Any]:
    row = {name: value for name, value in table.slice(index, 1).to_pylist()[0].items() if value is not None}
    return row | ({"split": split} if split else {})


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
        types = dict.fromkeys(names, pa.string())
        texts = csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])  # NA is a text
        return [("", csv.read_csv(path, parse_options=parse, convert_options=texts))]
    if (splits := path / "dataset_dict.json").is_file():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        return [(name, table) for name in names for _, table in _read_tables(path / name)]
    files = json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]
    parts = [pa.ipc.open_stream(pa.memory_map(str(path / file["filename"]))).read_all() for file in files]
    return [("", pa.concat_tables(parts))]
