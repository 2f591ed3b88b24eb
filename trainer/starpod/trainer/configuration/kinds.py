"""Sections of several kinds, each of which owns its keys: `filter: {strategy: top_p, value: 0.9}`.

A field of such a section is annotated with a union of classes and the key that tells them apart:

    filter: Annotated[KeepAll | TopFraction | TopP, KindBy("strategy")] = KeepAll()

The first class is the default. A word alone is the kind: `filter: top_p`. A class whose key is annotated with `str` is
that of functions in users' files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args

from pydantic import BeforeValidator, Discriminator, GetCoreSchemaHandler, Tag
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from starpod.trainer.configuration.section import Section
from starpod.trainer.configuration.user_file import names_file

USERS = "FILE.py:NAME"
"""Name of the kind whose function is in a user's file."""


class Kinds:
    """The kinds of a section.

    Attributes:
        key: Key that names the kind.
        classes: Class of each kind by name; the default first.
    """

    def __init__(self, key: str, union: Any) -> None:
        self.key = key
        self.classes: dict[str, type[Section]] = {
            name: kind for kind in get_args(union) for name in (get_args(kind.model_fields[key].annotation) or (USERS,))
        }
        self.default = next(iter(self.classes))

    def name_of(self, values: Any) -> str:
        """Return the name of the kind that values have."""
        name = str(getattr(values, self.key) if isinstance(values, Section) else self.spell_out(values)[self.key])
        return USERS if names_file(name) else name

    def spell_out(self, values: Any) -> Any:
        """Return values with the key of their kind. A word alone is the kind, and null counts as not given."""
        if isinstance(values, Mapping):
            given = {key: value for key, value in values.items() if value is not None or key == self.key}
            return {self.key: self.default, **given}
        return values if isinstance(values, Section) else {self.key: values}

    def owners(self, key: str) -> list[str]:
        """Return the names of the kinds that have a key."""
        return [name for name, kind in self.classes.items() if key in kind.model_fields]


@dataclass(frozen=True, slots=True)
class KindBy:
    """Annotation of a union of sections that a key tells apart."""

    key: str

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = Kinds(self.key, union)
        tagged: Any = Union[tuple(Annotated[kind, Tag(name)] for name, kind in kinds.classes.items())]  # noqa: UP007
        notes = Discriminator(kinds.name_of), BeforeValidator(kinds.spell_out)
        return handler.generate_schema(Annotated[tagged, *notes])


def kinds_of(field: FieldInfo) -> Kinds | None:
    """Return the kinds of a field's section; None if it has only one."""
    keys = [note.key for note in field.metadata if isinstance(note, KindBy)]
    return Kinds(keys[0], field.annotation) if keys else None
