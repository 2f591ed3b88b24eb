"""States as bytes and back, without pickle: decoding never runs code.

MessagePack with extension types for what environments keep: tuples, sets, big integers, NumPy arrays and scalars,
`random.Random` streams. Dictionaries keep their order and any hashable keys.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np

_TUPLE, _SET, _FROZENSET, _INT, _ARRAY, _RANDOM, _MAP, _COMPLEX = range(1, 9)
_INT64 = range(-(2**63), 2**64)


class StateError(ValueError):
    """The bytes are not an encoded state, or a value cannot be encoded."""


def encode(state: Any) -> bytes:
    """Encodes nested plain values. Raises StateError naming the first type that has no encoding."""
    try:
        return _pack(state)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateError(f"cannot encode the state: {error}; override get_state and set_state") from error


def decode(data: bytes) -> Any:
    """Decodes what `encode` made. Raises StateError on anything else."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False, raw=False)
    except Exception as error:  # msgpack raises many types on hostile input; none may pass
        raise StateError(f"not an encoded state: {error}") from error


def _pack(value: Any) -> bytes:
    packed = msgpack.packb(_prepare(value), default=_encode_extension, strict_types=True, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def _prepare(value: Any) -> Any:
    """Replaces integers beyond 64 bits, which MessagePack refuses before `default` is asked."""
    if type(value) is int and value not in _INT64:
        return msgpack.ExtType(_INT, str(value).encode())
    if type(value) is list:
        return [_prepare(item) for item in value]
    if type(value) is dict:
        if all(type(key) in (str, int) and (type(key) is str or key in _INT64) for key in value):
            return {key: _prepare(item) for key, item in value.items()}
        return msgpack.ExtType(_MAP, _pack([item for pair in value.items() for item in pair]))
    return value


def _encode_extension(value: Any) -> Any:
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, _pack(list(value)))
        case set() | frozenset():
            kind = _SET if isinstance(value, set) else _FROZENSET
            # Sorted by encoding: equal sets, equal bytes, whatever the hash seed.
            return msgpack.ExtType(kind, b"".join(sorted(_pack(item) for item in value)))
        case random.Random():
            return msgpack.ExtType(_RANDOM, _pack(list(_flatten_random(value))))
        case np.ndarray() if not value.dtype.hasobject:
            contiguous = np.ascontiguousarray(value)
            return msgpack.ExtType(_ARRAY, _pack([value.dtype.str, list(value.shape), contiguous.tobytes()]))
        case np.generic():
            return _prepare(value.item())
        case complex():
            return msgpack.ExtType(_COMPLEX, _pack([value.real, value.imag]))
        case bool() | int() | float() | str() | bytes():  # subclasses: enums and the like
            return _prepare(type(value).__mro__[-2](value))
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no encoding")


def _flatten_random(stream: random.Random) -> tuple[int, bytes, float | None]:
    version, words, gauss = stream.getstate()
    return version, np.asarray(words, dtype="<u4").tobytes(), gauss


def _decode_extension(code: int, data: bytes) -> Any:
    match code:
        case 1:
            return tuple(decode(data))
        case 2 | 3:
            unpacker = msgpack.Unpacker(ext_hook=_decode_extension, strict_map_key=False, raw=False)
            unpacker.feed(data)
            return set(unpacker) if code == _SET else frozenset(unpacker)
        case 4:
            return int(data)
        case 5:
            dtype, shape, buffer = decode(data)
            return np.frombuffer(buffer, dtype=np.dtype(dtype)).reshape(shape).copy()
        case 6:
            version, words, gauss = decode(data)
            stream = random.Random()
            stream.setstate((version, tuple(np.frombuffer(words, dtype="<u4").tolist()), gauss))
            return stream
        case 7:
            flat = decode(data)
            return dict(zip(flat[::2], flat[1::2], strict=True))
        case 8:
            return complex(*decode(data))
    raise StateError(f"unknown extension {code}")
