"""Checkers of text: exact, choice, regex and schema."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from starpod.env_server import read_untrusted_json

from .base import AnswerChecker, Grade

_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:]\s*(.*))?", re.DOTALL)


def normalise_text(text: str) -> str:
    """Return the text in Unicode's form NFKC and lower case, without quotes around it, a full stop, or blank runs."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip("\"'`").removesuffix(".")


class ExactChecker(AnswerChecker):
    """The answer is equal to a right one after `normalise_text`."""

    kind: Literal["exact"] = "exact"

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        return Grade(normalise_text(answer) in map(normalise_text, rights))


class ChoiceChecker(AnswerChecker):
    """The answer is the letter or the text of a choice. The choices are shown after the prompt."""

    kind: Literal["choice"] = "choice"
    choices: tuple[str, ...] = Field(min_length=2, max_length=26)

    def list_choices(self) -> str:
        return "".join(f"\n{chr(65 + number)}. {choice}" for number, choice in enumerate(self.choices))

    def _choose(self, answer: str) -> str:
        """Return the choice that an answer such as `B`, `(b)`, `B. Paris` or `Paris` names, or ""."""
        text, normal = answer.strip(), normalise_text(answer)
        choices = {choice.strip(): normalise_text(choice) for choice in self.choices}
        if text in choices:
            return text
        alike = [choice for choice in choices if normal and choices[choice] == normal]
        if len(alike) == 1:
            return alike[0]
        match = _LETTER.fullmatch(text)
        named = "".join(self.choices[ord(match[1].upper()) - 65 :][:1]).strip() if match else ""
        return named if match and normalise_text(match[2] or named) == choices.get(named) else ""

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        choice = self._choose(answer)
        return Grade(bool(choice) and choice in map(self._choose, rights))


class RegexChecker(AnswerChecker):
    """The whole answer matches a regular expression in RE2's syntax, in linear time."""

    packages: ClassVar[Mapping[str, str]] = {"re2": "google-re2"}
    kind: Literal["regex"] = "regex"
    pattern: str

    @cached_property
    def _compiled(self) -> Any:
        import re2

        try:
            return re2.compile(self.pattern)
        except re2.error as error:
            raise ValueError(f"{self.pattern!r} is no pattern of RE2: {error}") from None

    def expect(self, rights: Sequence[str]) -> None:
        if self._compiled and rights:
            super().expect(rights)

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        return Grade(self._compiled.fullmatch(answer) is not None)


class SchemaChecker(AnswerChecker):
    """The answer is JSON, alone or in a block of ```json, and satisfies a schema (JSON Schema 2020-12)."""

    packages: ClassVar[Mapping[str, str]] = {"jsonschema": "jsonschema", "re2": "google-re2"}
    kind: Literal["schema"] = "schema"
    json_schema: dict[str, Any] = Field(alias="schema")

    @cached_property
    def _validator(self) -> Any:
        """A validator whose patterns take linear time, and which fetches no other schema."""
        import re2
        from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
        from referencing import Registry

        def pattern(validator: Any, expression: str, value: Any, schema: Any) -> Iterator[ValidationError]:
            if isinstance(value, str) and not re2.search(expression, value):
                yield ValidationError(f"{value[:40]!r} does not match {expression!r}")

        if "patternProperties" in str(self.json_schema):
            raise ValueError("the schema has patternProperties, whose patterns can take exponential time")
        try:
            Draft202012Validator.check_schema(self.json_schema)
        except SchemaError as error:
            raise ValueError(f"the schema is no JSON Schema: {error.message[:200]}") from None
        kind: Any = validators.extend(Draft202012Validator, {"pattern": pattern})  # type: ignore[no-untyped-call]
        return kind(self.json_schema, registry=Registry())

    def expect(self, rights: Sequence[str]) -> None:
        if self._validator and rights:
            super().expect(rights)

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        from referencing.exceptions import Unresolvable

        fenced = _FENCE.fullmatch(answer)
        try:
            error = next(self._validator.iter_errors(read_untrusted_json(fenced[1] if fenced else answer)), None)
        except Unresolvable as problem:
            raise ValueError(f"the schema refers to {problem}, which is no part of it") from None
        except ValueError as problem:
            return Grade(0, f"It is not JSON: {problem}")
        return Grade(error is None, f"{error.json_path}: {error.message[:200]}" if error else "")
