"""The checkers by name, and reading of the column `reward`."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from starpod.env_server import read_untrusted_json
from starpod.v1.spelling import nearest

from .base import AnswerChecker
from .numbers import MathChecker, NumberChecker
from .programs import FunctionChecker, TestsChecker
from .text import ChoiceChecker, ExactChecker, RegexChecker, SchemaChecker

_CHECKERS: dict[str, type[AnswerChecker]] = {
    "exact": ExactChecker,
    "number": NumberChecker,
    "math": MathChecker,
    "choice": ChoiceChecker,
    "regex": RegexChecker,
    "schema": SchemaChecker,
    "tests": TestsChecker,
    "function": FunctionChecker,
}


def read_checker(value: Any, folder: Path) -> AnswerChecker:
    """Return the checker that a value of the column `reward` names. Raises ValueError.

    Args:
        value: a name such as "number", `FILE.py:NAME`, or an object of a name and settings, perhaps as JSON text:
            `{"kind": "number", "tolerance": 0.01}`.
        folder: folder of FILE.py.
    """
    if isinstance(value, str) and value.startswith("{"):
        value = read_untrusted_json(value)
    if isinstance(value, str):
        file, _, name = value.rpartition(":")
        value = {"kind": "function", "file": file, "name": name} if file.endswith(".py") else {"kind": value}
    settings = {name: setting for name, setting in value.items() if setting is not None}
    if settings.get("kind") == "function":
        settings["file"] = str(folder / str(settings.get("file")))
    return _checker(json.dumps(settings, sort_keys=True))


@functools.lru_cache(maxsize=1024)
def _checker(text: str) -> AnswerChecker:
    settings = json.loads(text)
    kind = str(settings.get("kind"))
    if kind == "judge":
        raise ValueError("a judge is a reward of the trainer: leave it out here, and see section rewards of the job")
    if kind not in _CHECKERS:
        raise ValueError(f"there is no reward {kind!r}{nearest(kind, _CHECKERS)}")
    for module, package in _CHECKERS[kind].packages.items():
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"reward {kind} needs the package {package}: pip install {package}")
    try:
        return _CHECKERS[kind].model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"reward {kind}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
