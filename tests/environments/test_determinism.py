"""Determinism: equal seeds give equal episodes in another process or thread, after a fork, and from a snapshot."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import LiveEpisode, Want
from starpod.env_server.episodes.state import decode, encode
from tests.environments.episodes import CASES, Case, each_case, next_action, play, start_case
from tests.support import ROOT

SEEDS = st.integers(0, 2**64 - 1)


def test_other_processes_and_threads_play_the_same() -> None:
    command = [sys.executable, "-m", "tests.environments.episodes"]
    other = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, stdout=subprocess.PIPE)
    here = [play(start_case(case, 3, 4), 3) for case in CASES]
    with ThreadPoolExecutor(8) as pool:
        twice = list(pool.map(lambda case: play(start_case(case, 3, 4), 3), [*CASES, *CASES]))
    assert twice == here * 2
    output, _ = other.communicate()
    assert json.loads(output) == here


@each_case
@settings(max_examples=6)
@given(seed=SEEDS, dynamics_seed=SEEDS, choices=SEEDS, turns=st.integers(0, 5))
def test_forks_and_snapshots_continue_equally(
    case: Case, seed: int, dynamics_seed: int, choices: int, turns: int
) -> None:
    original = start_case(case, seed, dynamics_seed)
    rng = random.Random(seed)
    for _ in range(turns):
        if not original.end_reason:
            original.turn([next_action(original, rng)], Want())
    assert not any(name.startswith("_cached") for name in original.environment.get_state())
    twin, saved = original.fork(None), original.save()
    assert len(saved) < 5000
    restored = LiveEpisode.load(case[0], saved)
    expected = play(original, choices)
    assert twin.save() == saved, "the original moved its fork"
    assert play(twin, choices) == play(restored, choices) == expected


@each_case
def test_options_come_back_from_their_own_dump(case: Case) -> None:
    """Logs, and snapshots of older servers, contain every option, not only the given ones."""
    options = case[0].Options(**case[1])
    assert case[0].Options(**options.model_dump(mode="json")) == options
    original = start_case(case, 1, 2)
    saved = decode(original.save())
    saved["options"] = options.model_dump(mode="json")
    restored = LiveEpisode.load(case[0], encode(saved))
    assert restored.environment.observe() == original.environment.observe()
    assert restored.environment.state_key() == original.environment.state_key()
