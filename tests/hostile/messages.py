"""Hypothesis strategies for protobuf messages, made from their descriptors: a new field is covered by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\0", "\u202e", "\x1b[2J", "%n%s", "{}", "[[[[", "1e999", "../../etc/passwd", "a" * 5000]),
)
_DEEPEST = 5

Fields = Mapping[str, st.SearchStrategy[Any]]
"""Strategies for fields by name (`field` or `Message.field`), where only some values lead anywhere."""


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, fields: Fields, depth: int = _DEEPEST) -> Message:
    """Messages of a type, with any subset of their fields."""
    values = {}
    for field in descriptor.fields:
        if (depth > 0 or field.type != FieldDescriptor.TYPE_MESSAGE) and draw(st.booleans()):
            values[field.name] = draw(_values(field, fields, depth))
    return _build(message_factory.GetMessageClass(descriptor), values)


def _build(cls: type[Message], values: dict[str, Any]) -> Message:
    message = cls()
    for name, value in values.items():
        field = cls.DESCRIPTOR.fields_by_name[name]
        if isinstance(value, dict):  # a map
            for key, item in value.items():
                if isinstance(item, Message):
                    getattr(message, name)[key].CopyFrom(item)
                else:
                    getattr(message, name)[key] = item
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def _values(field: FieldDescriptor, fields: Fields, depth: int) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_single(key, {}, depth), _single(value, {}, depth - 1), max_size=3)
    single = _single(field, fields, depth)
    return st.lists(single, max_size=4) if field.is_repeated else single


def _single(field: FieldDescriptor, fields: Fields, depth: int) -> st.SearchStrategy[Any]:
    for name in (f"{field.containing_type.name}.{field.name}", field.name):
        if name in fields:
            return fields[name]
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return messages(field.message_type, fields, depth - 1)
        case FieldDescriptor.TYPE_STRING:
            return _TEXTS
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=40)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return st.sampled_from([*known, 17, -1, 2**31 - 1, -(2**31)])
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324]))
    low, high = _INTEGERS[field.type]
    return st.one_of(st.integers(0, 3), st.integers(low, high), st.sampled_from([low, high]))
