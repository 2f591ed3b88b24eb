"""The recovery log: whatever a program does and whenever its server dies, it sees what it would have seen anyway."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.client import Fleet, Limits, ReplayDiverged, Session
from starpod.client.history import History, Opened, first_reply, step_reply
from starpod.v1 import environment_pb2 as pb
from tests.client.fake_server import FakeServer

WORDS = st.sampled_from(["left", "right", "bad", "straight on"])
SEEDS = st.integers(0, 2**64 - 1)
CHOICE = st.integers(0, 7)

# What a program does: (verb, which of its sessions, argument).
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), CHOICE, st.lists(WORDS, max_size=3)),
        st.tuples(st.just("step"), CHOICE, st.lists(WORDS, min_size=1, max_size=1)),
        st.tuples(st.just("reset"), CHOICE, st.tuples(SEEDS, st.none() | SEEDS, st.none() | st.integers(2, 9))),
        st.tuples(st.just("fork"), CHOICE, st.booleans()),
        st.tuples(st.just("restore"), CHOICE, st.none()),
        st.tuples(st.just("render"), CHOICE, st.none()),
    ),
    min_size=1,
    max_size=14,
)


async def live(deeds: list[tuple[str, int, Any]], deaths: set[int]) -> list[Any]:
    """Return what a program sees that performs these deeds while its server dies before each deed of `deaths`."""
    seen: list[Any] = []
    async with FakeServer() as server, Fleet(server.address) as fleet:
        sessions: list[Session] = await fleet.open("walk-v1", seed=5, count=2, limits=Limits(max_turns=40))
        for number, (verb, choice, argument) in enumerate(deeds):
            if number in deaths:
                # All sessions are gone: what a killed server looks like to those who come back.
                server.sessions.clear()
                server.keys.clear()
            session = sessions[choice % len(sessions)]
            match verb:
                case "step" if session.done:
                    continue
                case "step":
                    transition = await session.step(argument)
                    seen.append((transition.observation.text, transition.reward, transition.outcomes))
                    seen.append(transition.end_reason)
                case "reset":
                    seed, luck, length = argument
                    options = None if length is None else {"length": length}
                    observation = await session.reset(seed=seed, dynamics_seed=luck, options=options)
                    seen.append((observation.text, session.seed, session.dynamics_seed))
                case "fork":
                    copies = await session.fork(2, reseed=argument)
                    seen.extend((copy.observation.text, copy.step_index, copy.dynamics_seed) for copy in copies)
                    sessions.extend(copies)
                case "restore":
                    restored = await fleet.restore(await session.snapshot())
                    seen.append((restored.observation.text, restored.step_index))
                    sessions.append(restored)
                case "render":
                    seen.append(await session.render())
            seen.append((session.step_index, session.done))
        # Every session must still be able to go on as if nothing had been.
        for session in sessions:
            if not session.done:
                seen.append((await session.step("right")).observation.text)
    return seen


@given(deeds=DEEDS, deaths=st.sets(st.integers(0, 13), max_size=5))
def test_a_program_does_not_notice_that_its_server_died(deeds: list[tuple[str, int, Any]], deaths: set[int]) -> None:
    assert asyncio.run(live(deeds, deaths)) == asyncio.run(live(deeds, set()))


def history() -> History:
    origin = Opened("walk-v1", "1.0.0", None, 1, 2, pb.Limits(), pb.Want(), 0.0)
    return History(origin, first_reply(pb.Observation(state_key=b"first")))


REPLIES = st.builds(
    lambda key, text, reward: step_reply(
        pb.Transition(observation=pb.Observation(parts=[pb.Part(text=text)], state_key=key), reward=reward)
    ),
    st.binary(min_size=1, max_size=4),
    st.text(max_size=4),
    st.floats(-5, 5),
)
ENTRIES = st.lists(st.tuples(st.lists(WORDS).map(tuple), REPLIES), max_size=6)


@given(before=ENTRIES, mine=ENTRIES, copied=ENTRIES)
def test_a_copy_shares_the_past_and_not_the_future(before: Any, mine: Any, copied: Any) -> None:
    log = history()
    for entry in before:
        log.record(*entry)
    copy = log.copy()
    for entry in mine:
        log.record(*entry)
    for entry in copied:
        copy.record(*entry)
    assert log.actions == [actions for actions, _ in before + mine]
    assert copy.actions == [actions for actions, _ in before + copied]
    assert len(copy.keys) == len(copy.digests) == len(copy.actions) + 1


@given(entries=ENTRIES, data=st.data())
def test_the_check_accepts_what_was_recorded_and_nothing_else(entries: Any, data: st.DataObject) -> None:
    log = history()
    for entry in entries:
        log.record(*entry)
    everything = [(log.keys[0], log.digests[0]), *(reply for _, reply in entries)]
    for step, (key, digest) in enumerate(everything):
        log.check(step, (key, digest))
        log.check(step, (b"", digest))  # a server that gives no key
    step = data.draw(st.integers(0, len(entries)))
    key, digest = everything[step]
    with pytest.raises(ReplayDiverged, match=key.hex()) as diverged:
        log.check(step, (key + b"x", digest))
    assert (diverged.value.step, diverged.value.expected_key, diverged.value.found_key) == (step, key, key + b"x")
    with pytest.raises(ReplayDiverged, match="observation"):
        log.check(step, (key, digest + 1))
