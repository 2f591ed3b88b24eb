"""Seeds: disjoint by construction, stable across processes, and continued where they stood."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import RUN_STRIDE, SeedCursor, SeedRange, SeedsConfig, derive

RANGES = st.tuples(st.integers(0, 300), st.integers(1, 100)).map(lambda pair: SeedRange(start=pair[0], stop=sum(pair)))
NAMES = st.lists(st.text(max_size=3) | st.integers(-9, 9), max_size=4).map(tuple)


def test_derived_seeds_are_the_same_everywhere():
    code = "from starpod.trainer.configuration.seeds import derive; print(derive(3, 'reply', 'train', 7))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(other) == derive(3, "reply", "train", 7) == 3011071578697553349
    # Where a name ends matters, and so does its type.
    assert len({derive(0, "ab"), derive(0, "a", "b"), derive(0, "b", "a"), derive(0, "1"), derive(0, 1)}) == 5


@given(st.integers(0, 2**63), st.integers(0, 2**63), NAMES, NAMES)
def test_other_names_are_other_streams(seed, other, names, more):
    assert 0 <= derive(seed, *names) < 2**63
    same = seed == other and [(type(name), name) for name in names] == [(type(name), name) for name in more]
    assert (derive(seed, *names) == derive(other, *more)) == same


@given(RANGES, RANGES, RANGES, RANGES)
def test_ranges_are_refused_exactly_if_a_seed_is_in_two_of_them(final, selection, train, warmstart):
    sets = [set(range(one.start, one.stop)) for one in (final, selection, train, warmstart)]
    disjoint = len(set.union(*sets)) == sum(map(len, sets))
    try:
        SeedsConfig(final=final, selection=selection, train=train, warmstart=warmstart)
    except ValidationError as error:
        assert not disjoint
        assert "overlap" in str(error)
    else:
        assert disjoint


@given(st.integers(0, 2**64), st.integers(0, 2**50), st.integers(1, 300), st.integers(1, 5_000))
def test_what_teaches_or_chooses_is_never_the_final_measure(run_seed, taken, groups, episodes):
    config = SeedsConfig()
    purposes = [set(config.held_out("final", episodes)), set(config.held_out("selection", episodes))]
    for seeds in (config.train, config.warmstart):
        cursor = SeedCursor(seeds, run_seed)
        cursor.taken = taken
        drawn = cursor.take(groups)
        assert len(set(drawn)) == groups
        assert all(seed in seeds for seed in drawn)
        purposes.append(set(drawn))
    assert len(set.union(*purposes)) == sum(map(len, purposes))


def test_training_counts_upward_from_ten_thousand():
    assert SeedCursor(SeedsConfig().train).take(3) == [10_000, 10_001, 10_002]
    assert SeedCursor(SeedsConfig().train, 2).take(1) == [10_000 + 2 * RUN_STRIDE]
    assert list(SeedsConfig().held_out("final", 3)) == [0, 1, 2]
    assert list(SeedsConfig().held_out("selection", 2)) == [5000, 5001]

    # A range that is used up begins again.
    assert SeedCursor(SeedRange(start=5, stop=8)).take(5) == [5, 6, 7, 5, 6]


@given(st.lists(st.integers(0, 20), max_size=5), st.lists(st.integers(0, 20), max_size=5), st.integers(0, 99))
def test_a_cursor_continues_where_it_was(before, after, run_seed):
    seeds = SeedsConfig().train
    whole, first, second = (SeedCursor(seeds, run_seed) for _ in range(3))
    for count in before:
        first.take(count)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [seed for count in before + after for seed in whole.take(count)][sum(before) :] == [
        seed for count in after for seed in second.take(count)
    ]


@pytest.mark.parametrize("other", [SeedCursor(SeedsConfig().warmstart, 1), SeedCursor(SeedsConfig().train, 2)])
def test_a_cursor_of_other_seeds_is_refused(other):
    with pytest.raises(ConfigError, match="resume with the same seeds"):
        SeedCursor(SeedsConfig().train, 1).load_state_dict(other.state_dict())


def test_ranges_without_enough_seeds_are_refused():
    with pytest.raises(ValueError, match=r"seeds\.selection .* 5000 .* 5001"):
        SeedsConfig().held_out("selection", 5_001)

    with pytest.raises(ValidationError, match="must not be empty"):
        SeedRange(start=4, stop=4)
