"""The family of `tasks.jsonl`: an environment of its own for each file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from pydantic import Field, ValidationError, create_model

from starpod.env_server import Concurrency, EnvironmentSpec, Limits
from starpod.v1.environment_word import WordError, installed_ids
from starpod.v1.spelling import nearest

from .environment import MAX_CALLS, AnsweredTasks, Tasks, TasksOptions
from .file import TaskFile
from .questions import TasksSettings


def host(text: str) -> type[Tasks]:
    """Return the environment of `FILE?name=value&...`. Raises WordError with the line of a row that cannot be used."""
    name, _, query = text.partition("?")
    file = TaskFile(Path(name), _read_settings(query))
    settings = file.settings
    turns = settings.attempts + MAX_CALLS * bool(settings.tools)
    spec = EnvironmentSpec(
        id=settings.id or _id_of(file.path.stem),
        version=file.version,
        title=f"Questions of {file.path.name}",
        grammar="any text, or a call of a tool" if settings.tools else "any text",
        limits=Limits(max_turns=turns, max_actions_per_turn=1, max_actions=turns),
        concurrency=Concurrency.THREAD,  # rows are read from files, and some checkers wait for a process
    )
    sizes: Any = {"rows": {name: len(rows) for name, rows in file.splits.items()}}
    field = Field(default="all", description="Rows to play.", json_schema_extra=sizes)
    split: Any = (Literal[tuple(file.splits)], field)
    options = create_model("Options", __base__=TasksOptions, split=split)
    base = AnsweredTasks if file.is_answered else Tasks
    members = {"spec": spec, "file": file, "Options": options, "reference": (__name__, "host", text)}
    return type(base.__name__, (base,), {**members, "__module__": base.__module__})


def _read_settings(query: str) -> TasksSettings:
    try:
        pairs = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
        return TasksSettings.model_validate(pairs)
    except ValidationError as error:
        first, names = error.errors(include_url=False)[0], TasksSettings.model_fields
        name = str(first["loc"][0])
        hint = "" if name in names else nearest(name, names)
        raise WordError(f"?{query}: {name}: {first['msg']}{hint}") from None
    except ValueError as error:
        raise WordError(f"?{query}: {error}; write ?name=value&name=value, as in ?attempts=3&tools=python") from None


def _id_of(stem: str) -> str:
    """Return `name-v1` for the name of a file, with `tasks-` before it if that is no id or is one already."""
    id = f"{re.sub(r'[^a-z0-9_]+', '-', stem.lower()).strip('-')}-v1"
    return id if re.match("[a-z]", id) and id not in installed_ids() else f"tasks-{id}"
