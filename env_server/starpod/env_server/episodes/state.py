"""Encode states as bytes and decode them, without pickle: decoding never runs code.

The format is MessagePack with extension types for tuples, sets, big integers, NumPy arrays and scalars, and
`random.Random` streams. Dictionaries keep their order and may have any hashable keys.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from typing import Any

import msgpack
import numpy as np

_TUPLE, _SET, _FROZENSET, _INT, _ARRAY, _RANDOM, _MAP, _COMPLEX = range(1, 9)
_INT64 = range(-(2**63), 2**64)
_DEEPEST = 32
"""Maximum nesting of extension types. Each level is a decoder on the C stack, so a short forged state could otherwise
overflow it, which cannot be caught."""
_MOST_EQUAL_HASHES = 16
_DTYPE = re.compile(r"[<>|=]?[biufcmMSU?][0-9]{0,9}(\[[0-9]{0,4}[a-zA-Z]{1,2}\])?")


class StateError(ValueError):
    """The bytes are not an encoded state, or a value cannot be encoded."""


def encode(state: Any) -> bytes:
    """Encode nested plain values. Raises StateError, which names the first type without an encoding."""
    try:
        return _pack(state, _DEEPEST)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateError(f"cannot encode the state: {error}; override get_state and set_state") from error


def decode(data: bytes) -> Any:
    """Decode a result of `encode`. Raises StateError for any other bytes."""
    try:
        return _unpack(data, _DEEPEST)
    except Exception as error:  # msgpack raises many types on hostile input, and none may escape
        raise StateError(f"not an encoded state: {error}") from error


def _pack(value: Any, depth: int) -> bytes:
    if depth < 0:
        raise ValueError(f"it is nested more than {_DEEPEST} tuples, sets or maps deep")
    data = msgpack.packb(
        _prepare(value, depth),
        default=functools.partial(_encode_extension, depth),
        strict_types=True,
        use_bin_type=True,
    )
    assert isinstance(data, bytes)
    return data


def _prepare(value: Any, depth: int) -> Any:
    """Replace integers beyond 64 bits, which MessagePack refuses before it calls `default`."""
    if type(value) is int and value not in _INT64:
        return msgpack.ExtType(_INT, str(value).encode())
    if type(value) is list:
        return [_prepare(item, depth) for item in value]
    if type(value) is dict:
        if all(type(key) in (str, int) and (type(key) is str or key in _INT64) for key in value):
            return {key: _prepare(item, depth) for key, item in value.items()}
        return msgpack.ExtType(_MAP, _pack([item for pair in value.items() for item in pair], depth - 1))
    return value


def _encode_extension(depth: int, value: Any) -> Any:
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, _pack(list(value), depth - 1))
        case set() | frozenset():
            code = _SET if isinstance(value, set) else _FROZENSET
            # Sort by encoding, so that equal sets give equal bytes for every hash seed.
            return msgpack.ExtType(code, b"".join(sorted(_pack(item, depth - 1) for item in value)))
        case random.Random():
            return msgpack.ExtType(_RANDOM, _pack(list(_flatten_random(value)), depth - 1))
        case np.ndarray() if not value.dtype.hasobject:
            array = np.ascontiguousarray(value)
            return msgpack.ExtType(_ARRAY, _pack([value.dtype.str, list(value.shape), array.tobytes()], depth - 1))
        case np.generic():
            return _prepare(value.item(), depth)
        case complex():
            return msgpack.ExtType(_COMPLEX, _pack([value.real, value.imag], depth - 1))
        case int():  # this and the following are subclasses, such as enums
            return _prepare(int.__int__(value), depth)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
        case bytes():
            return bytes.__bytes__(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no encoding")


def _flatten_random(stream: random.Random) -> tuple[int, bytes, float | None]:
    version, words, gauss = stream.getstate()
    return version, np.asarray(words, dtype="<u4").tobytes(), gauss


def _unpack(data: bytes, depth: int) -> Any:
    hook = functools.partial(_decode_extension, depth)
    return msgpack.unpackb(data, ext_hook=hook, **_READING)


def _as_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    _expect_spread([key for key, _ in pairs])
    return dict(pairs)


def _expect_spread(keys: list[Any]) -> None:
    """Raise StateError if many keys have the same hash: a set or a dictionary of them would take quadratic time."""
    if len(keys) > _MOST_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > _MOST_EQUAL_HASHES:
        raise StateError(f"more than {_MOST_EQUAL_HASHES} members of a set or a dictionary have the same hash")


_READING: dict[str, Any] = {"object_pairs_hook": _as_dict, "strict_map_key": False, "raw": False}


def _decode_extension(depth: int, code: int, data: bytes) -> Any:
    if not depth:
        raise StateError(f"nested more than {_DEEPEST} deep")
    match code:
        case 1:
            return tuple(_unpack(data, depth - 1))
        case 2 | 3:
            hook = functools.partial(_decode_extension, depth - 1)
            unpacker = msgpack.Unpacker(ext_hook=hook, **_READING)
            unpacker.feed(data)
            members = list(unpacker)
            _expect_spread(members)
            return set(members) if code == _SET else frozenset(members)
        case 4:
            return int(data)
        case 5:
            dtype, shape, buffer = _unpack(data, depth - 1)
            if not _DTYPE.fullmatch(dtype):
                raise StateError(f"unknown dtype {dtype[:32]!r}")
            return np.frombuffer(buffer, dtype=np.dtype(dtype)).reshape(shape).copy()
        case 6:
            version, words, gauss = _unpack(data, depth - 1)
            stream = random.Random()
            stream.setstate((version, tuple(np.frombuffer(words, dtype="<u4").tolist()), gauss))
            return stream
        case 7:
            flat = _unpack(data, depth - 1)
            return _as_dict(list(zip(flat[::2], flat[1::2], strict=True)))
        case 8:
            return complex(*_unpack(data, depth - 1))
    raise StateError(f"unknown extension {code}")
