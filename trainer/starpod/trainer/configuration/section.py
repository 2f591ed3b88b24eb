"""Base class of the configuration's sections, the error for a wrong configuration, and the shipped configurations.

This module does not import torch, so that the command line starts quickly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo


def packaged_configs() -> dict[str, Path]:
    """Return the configurations that come with the package, by name."""
    folder = Path(str(resources.files("starpod.trainer"))) / "configs"
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
    """A combination of values that is refused."""

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

    @classmethod
    def all_fields(cls) -> dict[str, FieldInfo]:
        """Return the fields that a configuration may set."""
        return dict(cls.model_fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in YAML and JSON."""
        return self.model_dump(mode="json")


class Kinds(Section):
    """A section with several kinds. The class that sets KIND is the default kind, and its subclasses are the others.

    Each kind declares its own keys, and a different default for the field that KIND names. A key of another kind is
    refused; null counts as not given.
    """

    KIND: ClassVar[str] = ""
    """Name of the field that distinguishes the kinds."""

    @classmethod
    def kinds(cls) -> list[type[Kinds]]:
        """Return this section class and all classes derived from it."""
        return [cls, *(kind for subclass in cls.__subclasses__() for kind in subclass.kinds())]

    @classmethod
    def all_fields(cls) -> dict[str, FieldInfo]:
        return {
            **{name: field for kind in cls.kinds() for name, field in kind.model_fields.items()},
            **cls.model_fields,
        }

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Kinds]) -> Kinds:
        if isinstance(values, str):
            values = {cls.KIND: values}
        if "KIND" not in vars(cls) or not isinstance(values, Mapping):
            return handler(values)
        classes = {kind.model_fields[cls.KIND].default: kind for kind in cls.kinds()}
        name = values.get(cls.KIND, cls.model_fields[cls.KIND].default)
        kind = classes.get(name, cls)
        items = {key: value for key, value in values.items() if value is not None}
        for key in items:
            if key not in kind.model_fields and (
                owners := [str(owner) for owner in classes if key in classes[owner].model_fields]
            ):
                raise ValueError(
                    f"{key} belongs to {cls.KIND} {' or '.join(owners)}, and {cls.KIND} is {name}: drop it, or set "
                    f"{cls.KIND} to {owners[0]}"
                )
        return handler(items) if kind is cls else kind.model_validate(items)
