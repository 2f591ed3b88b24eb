"""Each requirement has a number of its own and one sentence."""

from starpod.check.requirement import LEVELS
from starpod.check.suite import REQUIREMENTS


def test_ids_are_unique_and_ascend_within_their_level() -> None:
    ids = [requirement.id for requirement in REQUIREMENTS]
    assert len(set(ids)) == len(ids)
    for letter in LEVELS:
        own = [id_ for id_ in ids if id_.startswith(letter)]
        assert own == sorted(own)


def test_a_title_is_one_sentence() -> None:
    for requirement in REQUIREMENTS:
        assert requirement.title.endswith("."), requirement.id
        assert "\n" not in requirement.title
