"""Reading and writing of YAML 1.2 with ruamel.yaml, which refuses a key that is given twice.

Its limits are ours: a small file cannot fill the memory. A date is a text, as in the core schema of YAML 1.2.
"""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.parser import Parser
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers

MAX_DEPTH = 64
"""Maximum nesting of lists and mappings."""
MAX_NODES = 100_000
"""Maximum number of values in a document, with aliases expanded, because nested aliases can expand to billions."""


class YamlError(ValueError):
    """The text is not usable YAML. The message says what is wrong and names the line."""


def load_yaml(text: str) -> Any:
    """Return the value of a document, None if it is empty.

    Args:
        text: One YAML document; a byte order mark at its beginning is skipped.

    Raises:
        YamlError: The text is not YAML, holds a key twice, or exceeds MAX_DEPTH or MAX_NODES.
    """
    reader = YAML(typ="safe", pure=True)
    reader.Resolver, reader.Parser = _ReadingResolver, _BoundedParser
    try:
        return reader.load(text)
    except DuplicateKeyError as error:
        key = str(error.problem).split('"')[1]
        raise YamlError(f"line {error.problem_mark.line + 1}: the key {key!r} is given twice") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(f"{line}{' '.join(filter(None, (error.context, error.problem)))}") from None
    except (YAMLError, ValueError, OverflowError) as error:
        raise YamlError(" ".join(str(error).split())) from None


def dump_yaml(value: Any) -> str:
    """Return plain values as a YAML document that `load_yaml` and readers of YAML 1.1 read as the same values."""
    writer = YAML(typ="safe", pure=True)
    writer.Resolver, writer.Representer = _WritingResolver, _Representer
    writer.default_flow_style, writer.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    stream = io.StringIO()
    writer.dump(value, stream)
    return stream.getvalue()


class _BoundedParser(Parser):
    """Parser that raises MarkedYAMLError if a document is nested too deep or too large, or if an alias contains itself.

    It stops at the event that breaks a limit, before a value is made of it.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._sizes: dict[str, int] = {}
        self._open_starts: list[tuple[str | None, int]] = []
        self._count = 0

    def get_event(self) -> Any:
        event = super().get_event()
        if isinstance(event, CollectionEndEvent):
            anchor, start = self._open_starts.pop()
        elif isinstance(event, NodeEvent):
            anchor, start = event.anchor, self._count
            self._count += 1
        else:
            return event
        if isinstance(event, AliasEvent):
            if event.anchor in (name for name, _ in self._open_starts):
                raise MarkedYAMLError(problem="an alias that contains itself", problem_mark=event.start_mark)
            self._count += self._sizes.get(event.anchor, 1) - 1
        elif isinstance(event, CollectionStartEvent):
            self._open_starts.append((anchor, start))
        elif anchor:
            self._sizes[anchor] = self._count - start
        if len(self._open_starts) > MAX_DEPTH:
            raise MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=event.start_mark)
        if self._count > MAX_NODES:
            raise MarkedYAMLError(problem=f"more than {MAX_NODES:,} values", problem_mark=event.start_mark)
        return event


def _resolvers(*versions: tuple[int, int], without: tuple[str, ...] = ()) -> dict[str, list[tuple[str, Any]]]:
    """Return ruamel's patterns of plain scalars, with their tags, by first character."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for of_versions, tag, pattern, first in implicit_resolvers:
        if set(versions) & set(of_versions) and tag.rpartition(":")[2] not in without:
            for character in first:
                found.setdefault(character, []).append((tag, pattern))
    return found


class _ReadingResolver(VersionedResolver):
    versioned_resolver = _resolvers((1, 2), without=("timestamp", "merge"))


class _WritingResolver(VersionedResolver):
    """Text is quoted if either version of YAML would read it as something else."""

    versioned_resolver = _resolvers((1, 1), (1, 2))


class _Representer(SafeRepresenter):
    def represent_text(self, text: str) -> Any:
        # In single quotes, these characters would be read back as a blank or a line break.
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_number(self, number: float) -> Any:
        node = self.represent_float(number)
        if "e" in node.value and "." not in node.value:  # a reader of YAML 1.1 needs a point
            node.value = node.value.replace("e", ".0e")
        return node


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_number)
