"""Gymnasium environments as services: the same episodes as in process, and everything around them."""

from __future__ import annotations

import io
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import seeding
from PIL import Image as Pillow

from starpod.client import JSON, BadArgument, EndReason, Image, SyncFleet, Unsupported, Want
from starpod.env_server.authoring.environment import Concurrency
from starpod.env_server.episodes.state import StateError
from starpod.env_server.hosting.families import NothingFits, add_hosted
from starpod.env_server.hosting.gymnasium import host
from starpod.env_server.hosting.hosted import MAX_REPLAYED_ACTIONS
from starpod.env_server.registry import Registry
from tests.env_server.hosting.checks import (
    ALL_LEVELS,
    WITHOUT,
    check_contract,
    check_recovery,
    check_refusal,
    spec_of,
    words,
)
from tests.support import ROOT, ServerProcess

STRANGE = "tests.env_server.hosting.strange:strange"
WORDS = words(
    "gymnasium",
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
LAKE, TAXI, BLACKJACK, CART = (
    f"gymnasium-{name}" for name in ("frozen-lake-v1", "taxi-v4", "blackjack-v1", "cart-pole-v1")
)
PICTURES, UNSEEDED, WILD = (f"gymnasium-strange-{name}-v2" for name in ("pictures", "unseeded", "wild"))


def in_process(id: str, seed: int, actions: Iterator[int], luck: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Play in Gymnasium itself: yield the first observation, then (action, observation, reward, ends) until the end."""
    environment = gymnasium.make(id, disable_env_checker=True)
    seen, _ = environment.reset(seed=seed)
    if luck is not None:
        environment.unwrapped.np_random = seeding.np_random(luck)[0]
    yield (seen,)
    for action in actions:
        seen, reward, terminated, truncated, _ = environment.step(action)
        yield action, seen, float(reward), terminated, truncated
        if terminated or truncated:
            return


def same(text: str, seen: Any) -> bool:
    """Whether a text says exactly the observation, to the last bit."""
    value = json.loads(text)
    if isinstance(seen, np.ndarray):
        return np.array_equal(np.array(value, dtype=seen.dtype), seen)
    return bool(value == (list(seen) if isinstance(seen, tuple) else seen))


@pytest.mark.parametrize(
    ("id", "hosted", "episodes"),
    [
        ("FrozenLake-v1", LAKE, 60),
        ("Blackjack-v1", BLACKJACK, 40),
        ("CartPole-v1", CART, 8),
        ("Taxi-v4", TAXI, 1),
    ],
)
def test_episodes_are_those_of_gymnasium(id: str, hosted: str, episodes: int, fleet: SyncFleet) -> None:
    """Observations, rewards and ends of random episodes; Taxi's are cut by Gymnasium's time limit."""
    choices = np.random.default_rng(5)
    count = len(spec_of(fleet, hosted).action_space.names)
    sessions = [fleet.open(hosted, seed=seed)[0] for seed in range(episodes)]
    played = [
        in_process(id, seed, (int(choices.integers(count)) for _ in itertools.count())) for seed in range(episodes)
    ]
    for session, own in zip(sessions, played, strict=True):
        assert same(session.observation.text, next(own)[0])
    while live := [pair for pair in zip(sessions, played, strict=True) if not pair[0].done]:
        expected = [next(own) for _, own in live]
        transitions = fleet.step_many([session for session, _ in live], [str(step[0]) for step in expected])
        for transition, (_, seen, reward, terminated, truncated) in zip(transitions, expected, strict=True):
            assert same(transition.observation.text, seen)
            assert transition.reward == reward
            assert (transition.terminated, transition.truncated) == (terminated, truncated and not terminated)
    assert all(next(own, None) is None for own in played)
    reasons = {session.end_reason for session in sessions}
    assert reasons == {EndReason.ENVIRONMENT_LIMIT if id == "Taxi-v4" else EndReason.TERMINAL}
    fleet.close_sessions(sessions)


def test_a_group_shares_its_start_and_only_its_first_member_has_gymnasiums_random_state(fleet: SyncFleet) -> None:
    sessions = fleet.open(LAKE, seed=11, count=6)
    walks = []
    for member, session in enumerate(sessions):
        luck = session.dynamics_seed if member else None
        played = list(in_process("FrozenLake-v1", 11, itertools.cycle([1, 2]), luck))
        walk = [session.observation.text]
        for action, *_ in played[1:]:
            walk.append(session.step(str(action)).observation.text)
        assert walk == [str(step[0] if len(step) == 1 else step[1]) for step in played]
        assert session.done
        walks.append(walk)
    assert len({walk[0] for walk in walks}) == 1
    assert len(set(map(tuple, walks))) > 3


def test_success_is_the_return_that_the_registration_calls_one(fleet: SyncFleet) -> None:
    """Reaching the goal is a success, and falling into a hole is a failure. The ice is not slippery."""
    for actions, success in (("Down Down Right Right Down Right", True), ("Right Down", False)):
        (session,) = fleet.open("dry_lake-v1", seed=1)
        for action in actions.split():
            transition = session.step(action)
        assert (transition.terminated, transition.success, transition.reward) == (True, success, float(success))


def test_names_and_drawings_are_the_operators_choice(fleet: SyncFleet) -> None:
    spec = spec_of(fleet, "dry_lake-v1")
    assert spec.action_space.names == ["Left", "Down", "Right", "Up"]
    assert "Left (0), Down (1)" in spec.instructions
    assert "Description" not in spec.instructions
    (session,) = fleet.open("dry_lake-v1", seed=1)
    assert session.observation.text == "<red>S</red>FFF\nFHFH\nFFFH\nHFFG"
    assert session.step("down").observation.text == "  (Down)\nSFFF\n<red>F</red>HFH\nFFFH\nHFFG"
    assert not session.step("1").outcomes[0].executed


def test_instructions_are_the_packages_own(fleet: SyncFleet) -> None:
    spec = spec_of(fleet, LAKE)
    assert "- 0: Move left" in spec.instructions
    assert "Arguments" not in spec.instructions
    assert "generate_random_map" not in spec.instructions
    assert spec.instructions.endswith("An action is a whole number from 0 to 3.")


def test_what_is_known_after_a_reset_counts_and_a_class_without_a_docstring_has_no_other() -> None:
    late = host(f"{STRANGE}/Late-v2#concurrency=inline")
    assert (late.spec.limits.max_turns, late.spec.actions) == (128, ("0", "1"))
    assert late.spec.instructions.splitlines() == [
        "This is strange/Late-v2.",
        "You see a whole number from 0 to 999.",
        "An action is a whole number from 0 to 1.",
    ]


def test_a_mask_tells_the_valid_actions(fleet: SyncFleet) -> None:
    (session,) = fleet.open(TAXI, seed=3, want=Want(valid_actions=True))
    environment = gymnasium.make("Taxi-v4")
    _, info = environment.reset(seed=3)
    assert session.observation.valid_actions == tuple(str(n) for n in np.flatnonzero(info["action_mask"]))
    *_, info = environment.step(0)
    assert session.step("0").observation.valid_actions == tuple(str(n) for n in np.flatnonzero(info["action_mask"]))


def test_info_survives(fleet: SyncFleet) -> None:
    (session,) = fleet.open(TAXI, seed=3)
    info = session.step("0").info
    assert info["prob"] == 1.0
    assert len(info["action_mask"]) == 6
    (session,) = fleet.open(UNSEEDED)
    assert session.step("0").info == {"mean": 0.5, "worst": "inf"}


def test_options_are_the_constructors_switches_and_numbers(fleet: SyncFleet) -> None:
    spec = spec_of(fleet, LAKE)
    properties = json.loads(spec.options_schema_json)["properties"]
    assert {name: (field["type"], field["default"]) for name, field in properties.items()} == {
        "is_slippery": ("boolean", True),
        "success_rate": ("number", pytest.approx(1 / 3)),
    }
    (dry,) = fleet.open(LAKE, seed=1, options={"is_slippery": False})
    assert dry.step("2").observation.text == "1"
    for options in ({"map_name": "8x8"}, {"desc": ["SG"]}, {"render_mode": "human"}):
        with pytest.raises(BadArgument, match=f"has no option '{next(iter(options))}'"):
            fleet.open(LAKE, options=options)
    with pytest.raises(BadArgument, match=r"options\.is_slippery"):
        fleet.open(LAKE, options={"is_slippery": "x"})
    unseeded = json.loads(spec_of(fleet, UNSEEDED).options_schema_json)
    assert list(unseeded["properties"]) == ["easy"]


def test_a_constructor_that_refuses_a_callers_choice_is_a_bad_argument(fleet: SyncFleet) -> None:
    with pytest.raises(BadArgument, match="highest is 5000; use 1 to 1000"):
        fleet.open(PICTURES, options={"highest": 5000})


def test_structures_travel_as_json_and_pictures_as_pictures(fleet: SyncFleet) -> None:
    spec = spec_of(fleet, PICTURES)
    assert '"move": a JSON list of whole numbers: 0 to 1, 0 to 2' in spec.action_space.grammar
    (session,) = fleet.open(PICTURES, seed=4)
    text, picture = session.observation.parts
    seen = json.loads(text)
    drawn = int(seen["say"].removeprefix("drew "))
    assert seen == {"view": 1, "board": [[drawn, 0.1], ["inf", -1.0]], "say": f"drew {drawn}"}
    assert isinstance(picture, Image)
    pixels = np.asarray(Pillow.open(io.BytesIO(picture.data)))
    assert pixels.shape == (20, 30, 3)
    assert (pixels == drawn % 256).all()
    assert Pillow.open(io.BytesIO(session.render("png"))).size == (30, 20)
    good = {"move": [1, 2], "word": "ab"}
    transition = session.step([json.dumps(good), JSON(good)])
    assert [outcome.valid for outcome in transition.outcomes] == [True, True]
    bad = ("x", "[1, 2]", '{"move": [1, 3], "word": "a"}', '{"move": [1.5, 0], "word": "a"}', '{"move": [0, 0]}')
    transition = session.step([*bad, json.dumps(good | {"word": "abc"}), "[" * 100_000])
    assert [outcome.valid for outcome in transition.outcomes] == [False] * 7
    assert transition.reward == 0


def test_copies_and_snapshots_are_offered_where_they_are_true(fleet: SyncFleet) -> None:
    told = {
        spec.id: (spec.capabilities.deterministic, spec.capabilities.fork, spec.capabilities.snapshot)
        for spec in fleet.describe()
    }
    assert told[LAKE] == told[PICTURES] == (True, True, True)
    assert (told[UNSEEDED], told[WILD]) == ((False, True, False), (False, False, False))
    for call in ("fork", "snapshot"):
        (session,) = fleet.open(WILD)
        with pytest.raises(Unsupported):
            getattr(session, call)()


def test_a_copy_of_what_never_repeats_continues_as_the_original(fleet: SyncFleet) -> None:
    (session,) = fleet.open(UNSEEDED)
    session.step("0")
    (copy,) = session.fork()
    assert copy.observation.text == session.observation.text
    ends = [[each.step("1").observation.text for _ in range(4)] for each in (copy, session)]
    assert ends[0] == ends[1]
    assert copy.done


def test_a_reseeded_fork_has_the_given_random_state(fleet: SyncFleet) -> None:
    (session,) = fleet.open(BLACKJACK, seed=9)
    one, two, other = session.fork(3, reseed=True, dynamics_seeds=[1, 1, 2])
    results = []
    for each in (one, two, other):
        texts = []
        while not each.done and len(texts) < 4:
            texts.append(each.step("1").observation.text)
        results.append(texts)
    assert results[0] == results[1] != results[2]
    again, replayed = two.snapshot(), one.snapshot()
    assert again.state == replayed.state


def test_an_uncopied_environment_is_forked_by_playing_again() -> None:
    uncopied = host(f"{STRANGE}/Uncopied-v2")
    assert (uncopied.spec.fork, uncopied.spec.snapshot, uncopied.copies) == (True, True, False)
    assert uncopied.spec.concurrency is Concurrency.PROCESS


def test_the_word_of_the_operator_counts() -> None:
    wild = host(f"{STRANGE}/Wild-v2#deterministic=yes&concurrency=inline").spec
    assert (wild.deterministic, wild.fork, wild.snapshot) == (True, True, True)
    doubted = host("CliffWalking-v1#deterministic=no").spec
    assert (doubted.deterministic, doubted.fork, doubted.snapshot) == (False, True, False)
    alone = host("CliffWalking-v1#deterministic=no&concurrency=process").spec
    assert (alone.fork, alone.snapshot) == (False, False)


def test_what_would_take_too_long_to_play_again_is_not_saved() -> None:
    environment = host("CliffWalking-v1")()
    environment._past = ["0"] * (MAX_REPLAYED_ACTIONS + 1)
    with pytest.raises(StateError, match=f"episodes of up to {MAX_REPLAYED_ACTIONS} are saved"):
        environment.get_state()
    forged = {"past": ["0"] * (MAX_REPLAYED_ACTIONS + 1), "luck": 1, "dynamics_seed": 1, "placed": True}
    for state in (forged, forged | {"past": [{}]}, forged | {"past": "00"}):
        with pytest.raises(ValueError, match="played"):
            environment.set_state(state)


def test_sessions_in_processes_of_their_own_are_the_same_episodes(fleet: SyncFleet) -> None:
    (session,) = fleet.open("alone-v1", seed=2)
    copy, reseeded = session.fork()[0], session.fork(1, reseed=True)[0]
    restored = fleet.restore(session.snapshot())
    here = host(f"{STRANGE}/Draws-v2?highest=500#concurrency=inline")()
    here.options, here.seed, here.dynamics_seed = here.Options(), 2, session.dynamics_seed
    here.reset(random.Random())
    texts = [each.step("0").observation.text for each in (session, copy, restored)]
    here.step("0")
    assert {*texts} == {here.observe()}
    assert reseeded.step("0").observation.text not in texts
    with pytest.raises(BadArgument, match="highest is 0; use 1 to 1000"):
        fleet.open("alone-v1", options={"highest": 0})


FORKED_AND_SAVED = {"F-10", "N-11"}


def test_the_contract_is_kept_at_all_levels(server: ServerProcess) -> None:
    (missing,) = check_contract(server, LAKE, required=ALL_LEVELS).values()
    # there is one server, it draws no pictures here, and its first observations are the same with all options
    assert set(missing) <= {*WITHOUT, *FORKED_AND_SAVED, "C-80", "N-10", "C-57", "C-70"}


def test_every_class_and_kind_of_action_keeps_the_contract(server: ServerProcess) -> None:
    check_contract(server, TAXI, BLACKJACK, CART, "alone-v1", PICTURES)


def test_copies_and_their_absence_keep_the_contract(server: ServerProcess) -> None:
    required = [id for id in ALL_LEVELS if id[0] in "FN"]
    skipped = check_contract(server, PICTURES, UNSEEDED, WILD, required=required)
    assert [FORKED_AND_SAVED & {*each} for each in skipped.values()] == [FORKED_AND_SAVED, {"F-10"}, set()]


async def test_episodes_survive_a_killed_server(server: ServerProcess) -> None:
    await check_recovery(server, LAKE, ["0", "3"])


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("FrozenLak-v1", "did you mean FrozenLake-v1"),
        ("FrozenLake-v7", "did you mean FrozenLake-v1"),
        ("ALE/Pong-v5", "no installed package registers ALE/"),
        ("not_here:Thing-v0", "there is no module not_here; perhaps pip install not-here"),
        ("Pendulum-v1", r"the action space is Box\(-2.0, 2.0"),
        (f"{STRANGE}/Large-v2", r"the observation space\['map'\] is a Box of shape \(84, 84\)"),
        ("FrozenLake-v1?slippery=false", "its constructor takes no 'slippery'; did you mean is_slippery"),
        ("FrozenLake-v1?is_slippery=maybe", "is_slippery='maybe'"),
        ("FrozenLake-v1?map_name=9x9", "its constructor raised KeyError"),
        ("FrozenLake-v1#colour=red", "there is no setting 'colour'"),
        ("FrozenLake-v1#options=map_name", "'map_name' cannot be open to callers"),
        ("FrozenLake-v1#actions=a,b,c,c", "must be 4 different names"),
        ("FrozenLake-v1#observation=ansi&render=png", "choose one"),
        ("CartPole-v1#observation=ansi", "does not render ansi"),
        ("FrozenLake-v1#success_at=high", "not a number"),
        ("FrozenLake-v1#concurrency=fibre", "use one of inline, thread, process"),
        ("?x=1", "not of the form"),
        ("FrozenLake-v1?is_slippery", "not of the form name=value"),
    ],
)
def test_what_cannot_be_hosted_says_why(wanted: str, problem: str) -> None:
    check_refusal(host, wanted, problem)


@pytest.mark.parametrize("name", ["Noisy-v2", "Nois*"])
def test_what_a_package_writes_hides_no_reason(name: str) -> None:
    words = ("serve", f"gymnasium:{STRANGE}/{name}", "--port", "0")
    command = [sys.executable, "-m", "starpod.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "there is no corpus" in line


def test_a_pattern_leaves_out_what_takes_long_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.env_server.hosting.families.LONG_START", 0.1)
    registry = Registry()
    with pytest.raises(NothingFits, match=r"Busy-v2.*it takes more than 0.1 s to start: name it"):
        add_hosted(registry, f"gymnasium:{STRANGE}/Bus*")
    assert add_hosted(registry, f"gymnasium:{STRANGE}/Busy-v2#deterministic=yes") == ["gymnasium-strange-busy-v2"]
