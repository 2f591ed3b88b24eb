"""The assignment of conversations to slots."""

from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.engines.slot_cache import Slots
from starpod.trainer.models.folding import common_prefix


def test_what_differs_is_read_again_and_so_is_the_last_token() -> None:
    slots = Slots(1)
    slots.take("a", [1])
    slots.give_back(0, "a", [1, 2, 3])
    assert slots.take("a", [1, 9, 3, 4]) == (0, 1)
    slots.give_back(0, "a", [1, 9, 3])
    assert slots.take("a", [1, 9, 3]) == (0, 2)


def test_the_longest_unused_makes_room() -> None:
    slots = Slots(2)
    for name in "ab":
        slot, _ = slots.take(name, [1]) or (-1, 0)
        slots.give_back(slot, name, [1])
    slot, _ = slots.take("a", [1, 2]) or (-1, 0)
    slots.give_back(slot, "a", [1, 2])
    assert slots.take("c", [1, 2]) == (1, 0)
    assert slots.take("a", [1, 2, 3]) == (0, 2)
    assert slots.take("b", [1, 2]) is None


@given(
    st.lists(st.tuples(st.sampled_from(["take", "give", "forget"]), st.sampled_from(["", "a", "b", "c"])), max_size=40)
)
def test_no_slot_is_lost_or_used_twice(calls: list[tuple[str, str]]) -> None:
    slots, busy = Slots(2), []
    for what, name in calls:
        if what == "take" and (taken := slots.take(name, [1, 2])) is not None:
            assert taken[0] not in busy
            busy.append(taken[0])
        elif what == "give" and busy:
            slots.give_back(busy.pop(0), name, [1])
        elif what == "forget":
            slots.forget(name)
    while (taken := slots.take("", [1])) is not None:
        assert taken[0] not in busy
        busy.append(taken[0])
    assert sorted(busy) == [0, 1]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    shared = common_prefix(first, second)
    assert first[:shared] == second[:shared]
    assert shared == min(len(first), len(second)) or first[shared] != second[shared]
