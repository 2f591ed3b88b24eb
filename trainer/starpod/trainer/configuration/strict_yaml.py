"""Strict reading and writing of YAML 1.2.

Duplicate keys are refused, `No` is not false, `1:30` is not 90, and a small file cannot fill the memory. PyYAML alone
follows YAML 1.1, and silently keeps the last of two equal keys.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

MAX_DEPTH = 64
"""Maximum nesting of lists and mappings. PyYAML recurses, so without a limit a file of brackets crashes the process."""
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
    loader = None
    try:
        loader = _Loader(text.removeprefix("\ufeff"))
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {})
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(f"{line}{' '.join(filter(None, (error.context, error.problem)))}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise YamlError(" ".join(str(error).split())) from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(value: Any) -> str:
    """Return plain values as a YAML document that `load_yaml` and readers of YAML 1.1 read as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_CORE_SCHEMA = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)
"""Tag, pattern and first characters of each kind of plain scalar (YAML 1.2, section 10.3.2)."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # none of YAML 1.1's
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.get_mark())
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_core_float(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node)
        return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which either version of YAML would read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # In single quotes, these characters would be read back as a blank or a line break.
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_core_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_core_float)
_Dumper.add_representer(str, _Dumper.represent_text)


def _check(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values in a node with aliases expanded. Raise if it is too large or a key is duplicate."""
    if id(node) in sizes:
        size = sizes[id(node)]
        if not size:
            raise yaml.MarkedYAMLError(problem="an alias that contains itself", problem_mark=node.start_mark)
        return size
    sizes[id(node)] = 0  # while it is being counted
    size = 1
    if isinstance(node, yaml.MappingNode):
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            name = (key.tag, str(key.value))
            if name in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            keys.add(name)
            size += _check(key, sizes) + _check(value, sizes)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check(item, sizes) for item in node.value)
    if size > MAX_NODES:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES:,} values", problem_mark=node.start_mark)
    sizes[id(node)] = size
    return size
