"""One server of hosted Gymnasium environments, shared by all tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import ServerProcess, start_server

STRANGE = "tests.env_server.hosting.strange:strange"
GYMNASIUM = (
    "FrozenLake-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "CartPole-v1",
    "FrozenLake-v1?is_slippery=false#id=dry_lake-v1&actions=Left,Down,Right,Up&observation=ansi&instructions=brief",
    f"{STRANGE}/Pictures-v2#render=png&concurrency=thread",
    f"{STRANGE}/Unseeded-v2#concurrency=inline&options=easy",
    f"{STRANGE}/Wild-v2#concurrency=inline",
    f"{STRANGE}/Draws-v2?highest=500#id=alone-v1",
)


@pytest.fixture(scope="session")
def gym_server() -> Iterator[ServerProcess]:
    with start_server(*(word for text in GYMNASIUM for word in ("--gymnasium", text))) as process:
        yield process
