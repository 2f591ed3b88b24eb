"""Hosted Gymnasium environments keep the contract at the levels that they claim."""

from __future__ import annotations

import pytest

from tests.env_server.hosting.checks import WITHOUT, check_all
from tests.support import ServerProcess

ONE_SERVER = {"C-80", "N-10"}
FORKED_AND_SAVED = {"F-10", "N-11"}


@pytest.mark.parametrize(
    "ids",
    [
        ("gymnasium-frozen-lake-v1",),
        pytest.param(
            ("gymnasium-taxi-v4", "gymnasium-blackjack-v1", "gymnasium-cart-pole-v1", "alone-v1"),
            marks=pytest.mark.minutes,
        ),
    ],
)
def test_gymnasium_environments_keep_the_contract(ids: tuple[str, ...], gym_server: ServerProcess) -> None:
    for id, missing in check_all(gym_server.address, ids).items():
        # they draw no pictures here, and their first observations are the same with all options
        unshown = {*WITHOUT, *ONE_SERVER, *FORKED_AND_SAVED, "C-57", "C-70"}
        assert set(missing) - unshown <= ({"C-44", "C-58"} if "blackjack" in id else set()), (id, missing)


@pytest.mark.minutes
def test_pictures_copies_and_their_absence_keep_the_contract(gym_server: ServerProcess) -> None:
    ids = [f"gymnasium-strange-{name}-v2" for name in ("pictures", "unseeded", "wild")]
    skipped = check_all(gym_server.address, ids)
    pictures, unseeded, wild = (skipped[id] for id in ids)
    assert "C-70" not in pictures
    assert {*pictures} >= FORKED_AND_SAVED
    assert "F-10" in unseeded
    assert "N-11" not in unseeded
    assert not FORKED_AND_SAVED & {*wild}
