"""The same seeds give the same episode: in another process or thread, after a fork, from a snapshot."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.env_server.episode import Episode, Want
from starpod.env_server.state import encode
from tests.environments.episodes import CASES, Case, next_action, play, start_case

ROOT = Path(__file__).resolve().parents[2]
SEEDS = st.integers(0, 2**64 - 1)


def test_other_processes_play_the_same() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.environments.episodes", "3"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
            stdout=subprocess.PIPE,
        )
        for salt in ("1", "2")
    ]
    here = [play(start_case(case, seed, seed + 1), seed) for case in CASES for seed in range(3)]
    for run in runs:
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert json.loads(output) == here


def test_threads_do_not_disturb_each_other() -> None:
    jobs = [(case, seed) for case in CASES for seed in range(6)]
    alone = [play(start_case(case, seed, seed), seed) for case, seed in jobs]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda job: play(start_case(*job, job[1]), job[1]), jobs)) == alone


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{'-'.join(case[1]) or 'default'}")
@settings(max_examples=15)
@given(seed=SEEDS, dynamics_seed=SEEDS, choices=SEEDS, turns=st.integers(0, 5))
def test_forks_and_snapshots_go_on_the_same(
    case: Case, seed: int, dynamics_seed: int, choices: int, turns: int
) -> None:
    original = _played(case, seed, dynamics_seed, turns)
    twin = original.fork(None)
    saved = original.save()
    restored = Episode.load(case[0], saved)
    expected = play(original, choices)
    assert twin.save() == saved, "the original moved its fork"
    assert play(twin, choices) == expected
    assert play(restored, choices) == expected


@settings(max_examples=10)
@given(seed=SEEDS, dynamics_seed=SEEDS)
def test_caches_are_no_state(seed: int, dynamics_seed: int) -> None:
    for case in CASES:
        state = _played(case, seed, dynamics_seed, 1).environment.get_state()
        assert not any(name.startswith("_cached") for name in state)
        assert len(encode(state)) < 4096


@pytest.mark.parametrize("case", CASES)
def test_options_come_back_from_their_own_dump(case: Case) -> None:
    """As in a log, which holds every option and not only the given ones."""
    options = case[0].Options(**case[1])
    assert case[0].Options(**options.model_dump(mode="json")) == options


def _played(case: Case, seed: int, dynamics_seed: int, turns: int) -> Episode:
    state = start_case(case, seed, dynamics_seed)
    rng = random.Random(seed)
    for _ in range(turns):
        if not state.end_reason:
            state.turn([next_action(state, rng)], Want())
    return state
