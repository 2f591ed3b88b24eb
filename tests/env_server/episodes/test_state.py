"""States as bytes: every plain value comes back equal, nothing else gets in, and decoding runs no code."""

import contextlib
import enum
import pickle
import random
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.episodes.state import StateError, decode, encode

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.sets(keys),
        st.frozensets(keys),
    ),
    max_leaves=8,
)


@given(values)
def test_values_come_back_equal_and_of_their_type(value: object) -> None:
    back = decode(encode(value))
    assert repr(back) == repr(value) if not isinstance(value, set | frozenset | dict | list | tuple) else back == value
    assert type(back) is type(value)


class Number(enum.IntEnum):
    ONE = 1


class Name(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    ONE = "one"


@pytest.mark.parametrize("value", [Number.ONE, Name.ONE, [Number.ONE], {"a": Name.ONE}, {Number.ONE}, (np.int8(1),)])
def test_a_number_or_text_of_another_class_comes_back_plain(value: object) -> None:
    back = decode(encode(value))
    assert back == value and type(back) in (int, str, list, dict, set, tuple)


@given(st.sets(keys))
def test_equal_sets_are_equal_bytes(value: set[object]) -> None:
    other: set[object] = set()
    for item in sorted(value, key=repr, reverse=True):  # put in one by one, in another order
        other.add(item)
    assert encode(value) == encode(other)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32", "complex128", ">i4", "U3"])
def test_arrays_come_back(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = decode(encode({"board": array[:, ::2]}))["board"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array[:, ::2])
    back[0, 0] = back[1, 1]  # writable, like the original


@given(st.integers(), st.integers(0, 50))
def test_a_random_stream_continues_where_it_was(seed: int, draws: int) -> None:
    stream = random.Random(seed)
    for _ in range(draws):
        stream.random()
    stream.gauss(0, 1)
    back = decode(encode(stream))
    assert [back.gauss(0, 1) for _ in range(5)] == [stream.gauss(0, 1) for _ in range(5)]
    assert back.random() == stream.random()


@given(st.binary())
def test_foreign_bytes_are_refused_or_plain(data: bytes) -> None:
    with contextlib.suppress(StateError):
        decode(data)


@pytest.mark.parametrize("value", [{"f": open}, [np.array([object()])]])
def test_what_cannot_be_encoded_is_named(value: object) -> None:
    with pytest.raises(StateError, match="has no encoding; override get_state"):
        encode(value)


def test_a_pickle_is_not_a_state() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('executed')",)

    with pytest.raises(StateError):
        decode(pickle.dumps(Bomb()))


@pytest.mark.parametrize("levels", [33, 200, 5000])
def test_nesting_is_bounded_before_the_stack_overflows(levels: int) -> None:
    """Each level is a decoder on the C stack, so without the bound the process would crash."""
    nested = b"\x90"
    for _ in range(levels):
        nested = b"\x91\xc9" + len(nested).to_bytes(4, "big") + b"\x01" + nested
    with pytest.raises(StateError, match="nested more than 32 deep"):
        decode(nested)


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys])
def test_members_with_equal_hashes_are_refused_before_they_are_compared(make: Any) -> None:
    """Otherwise a forged state of a megabyte would hold up the server for minutes."""
    same = [number * sys.hash_info.modulus for number in range(1, 18)]
    assert decode(encode(make(same[:16]))) == make(same[:16])
    with pytest.raises(StateError, match="have the same hash"):
        decode(encode(make(same)))


def test_what_can_be_encoded_can_be_decoded_however_deep() -> None:
    value: object = 0
    for _ in range(32):
        value = (value,)
    assert decode(encode(value)) == value
    with pytest.raises(StateError, match="nested more than 32"):
        encode((value,))
    with pytest.raises(StateError, match="nested more than 32"):
        encode({(value,): 1})


@pytest.mark.parametrize("dtype", ["O", "V8", "i4,i4", "(2,3)f8", "S0"])
def test_arrays_of_other_kinds_are_refused(dtype: str) -> None:
    array = msgpack.packb([dtype, [1], b"\0" * 8])
    with pytest.raises(StateError):
        decode(msgpack.packb(msgpack.ExtType(5, array)))
