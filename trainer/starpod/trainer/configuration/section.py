"""Base class of the configuration's sections, the error for a wrong configuration, and the shipped configurations.

This module does not import torch, so that the command line starts quickly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)


def packaged_configs(section: str = "") -> dict[str, Path]:
    """Return the configurations that come with the package, by name; or those of a section."""
    folder = Path(str(resources.files("starpod.trainer"))) / "configs" / section
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def absolute_path(path: str) -> str:
    """Return an absolute path, with ~ expanded; "" stays ""."""
    return path and os.path.abspath(os.path.expanduser(path))


_PATH_WORD = re.compile(r"(.*=)?(.*?)(:[\w-]+)?", re.DOTALL)
"""`PATH`, `--OPTION=PATH` or `FILE.py:CLASS`."""


def _absolute_words(words: tuple[str, ...]) -> tuple[str, ...]:
    def absolute(word: str) -> str:
        option, path, name = _PATH_WORD.fullmatch(word).groups("")  # type: ignore[union-attr]
        is_path = (os.sep in path or path.endswith(".py")) and os.path.exists(path)
        return f"{option}{absolute_path(path)}{name}" if is_path else word

    return tuple(map(absolute, words))


# Paths are absolute in a run's config.yaml, so that the run can be resumed, exported and evaluated from another folder.
FilePath = Annotated[str, AfterValidator(absolute_path)]
"""Path of a file or folder; "" if there is none."""
CommandWords = Annotated[tuple[str, ...], AfterValidator(_absolute_words)]
"""Words of a command line. Those that name an existing file, with a separator or the suffix .py, are paths."""


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))


class ConfigError(Exception):
    """The configuration cannot be used. The message names the key, what was wrong and what to set instead."""


Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Contradiction(Generic[Subject]):
    """A combination of values that is refused, or that a user is warned of."""

    keys: tuple[str, ...]
    """Keys that it connects."""
    breaks: Callable[[Subject], object]
    """Returns something true, `found` in the sentence, if the subject breaks the rule."""
    sentence: str
    """Message: a format string of `c`, the subject, and `found`."""


def find_broken(rules: Iterable[Contradiction[Subject]], subject: Subject) -> str:
    """Return the message of the first rule that a subject breaks; "" if it breaks none."""
    problems = ((rule, found) for rule in rules if (found := rule.breaks(subject)))
    return next((rule.sentence.format(c=subject, found=found) for rule, found in problems), "")


class Section(BaseModel):
    """A frozen, validated part of the configuration tree. Unknown keys are refused.

    Each component declares its section next to its code, and config.py joins them. The `description` of a field is its
    help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    SHORTHAND: ClassVar[str] = ""
    """Field that is set if a single word is given for the section; "": a single word is refused."""

    BASES: ClassVar[str] = ""
    """Folder of the package with files that SHORTHAND names, and which contain values for keys that are not set."""

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, values: Any) -> Any:
        return {cls.SHORTHAND: values} if cls.SHORTHAND and isinstance(values, str) else values

    @field_validator("*", mode="before")
    @classmethod
    def _keep_truth_apart(cls, value: Any, info: ValidationInfo) -> Any:
        # Refuse booleans for numbers, because pydantic would accept true as 1.
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"{str(value).lower()} is not a value of this key")
        return value

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in YAML and JSON."""
        return self.model_dump(mode="json")
