"""Step: executed exactly once and in order, even if calls are repeated, late or out of order."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from starpod.check.expectations import BrokenCall, Unmet, expect, expect_played, expect_same
from starpod.check.handle import Handle, Turn
from starpod.check.probe import Probe
from starpod.check.refusal import from_error
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

OTHER = (pb.Action(text="another action"),)


@must("C-30", "A Step answers with one observation and with the index after its own.")
async def check_step(probe: Probe) -> None:
    if probe.target.play_error is not None:
        raise probe.target.play_error
    handle = await probe.seeded(want=probe.actions.want())
    observation = handle.session.observation
    for turn in ((), (), None):
        actions = (probe.actions.choices(observation)[0],) if turn is None else turn
        reply: pb.StepResponse = await probe.connection.call(handle.request(actions))
        expect(reply.HasField("transition"), "a transition", "none")
        expect(reply.transition.HasField("observation"), "an observation in the transition", "none")
        handle.index += 1
        expect(reply.next_step_index == handle.index, f"next_step_index {handle.index}", reply.next_step_index)
        observation = reply.transition.observation


@must("C-31", "The same Step again has the same reply.")
async def check_repeated_step(probe: Probe) -> None:
    handle = await probe.seeded()
    observation = handle.session.observation
    for actions in ((), tuple(probe.actions.choices(observation)[:1])):
        request = handle.request(actions)
        reply: pb.StepResponse = await probe.connection.call(request)
        for _ in range(2):
            repeat: pb.StepResponse = await probe.connection.call(request)
            expect_same(reply, repeat, "the reply of the repeated Step", "keep the last reply of each session")
        handle.index += 1


@must("C-32", "A repeated Step is not played again.")
async def check_repetition_in_episode(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded()
    transitions = []
    for turn in script.turns:
        request = handle.request(turn)
        reply: pb.StepResponse = await probe.connection.call(request)
        await probe.connection.refusal(request)
        transitions.append(reply.transition)
        handle.index += 1
    fix = "answer the last index from the cache, without stepping"
    expect_played(script.transitions, transitions, "the episode with every Step sent twice", fix)


@must("C-33", "The same Step sent many times at once is played once, and every copy has the same reply.")
async def check_simultaneous_repetition(probe: Probe) -> None:
    connections = [probe.connection, probe.second_connection()]
    handle = await probe.seeded()
    turns: list[Turn] = [(), tuple(probe.actions.choices(handle.session.observation)[:1])]
    expected: list[pb.Transition] = []
    if probe.target.repeats:
        script = probe.target.script()
        turns, expected = list(script.turns), list(script.transitions)
    for number, turn in enumerate(turns):
        request = handle.request(turn)
        calls = (connections[copy % 2].call(request) for copy in range(6))
        fix = "give each session a lock and look into the cache inside it"
        replies = await _gather_replies(calls, f"six copies of turn {number} at once", fix)
        for reply in replies:
            expect_same(replies[0], reply, f"the reply of each copy of turn {number}", fix)
        if expected:
            expect_played(expected[number : number + 1], [replies[0].transition], f"turn {number}", fix)
        handle.index += 1


@must("C-34", "The last index with other actions is FAILED_PRECONDITION.")
async def check_other_actions(probe: Probe) -> None:
    handle = await probe.seeded()
    actions = probe.actions.choices((await handle.step()).observation)[:1]
    fix = "compare the actions with those of the cached reply"
    await _out_of_order(probe, "the last index with other actions", handle.request(actions, ahead=-1), fix)


@must("C-35", "An index ahead of the next one is FAILED_PRECONDITION.")
async def check_index_gap(probe: Probe) -> None:
    handle = await probe.seeded()
    for ahead in (1, 2, 256, 65_536):
        await _out_of_order(probe, f"an index {ahead} too high", handle.request(ahead=ahead))


@must("C-36", "An index before the last one is FAILED_PRECONDITION, whatever the actions.")
async def check_late_index(probe: Probe) -> None:
    handle = await probe.seeded()
    request = handle.request()
    await handle.step()
    await handle.step()
    await _out_of_order(probe, "a Step that comes two turns late", request)


@must("C-37", "An epoch other than the current one is FAILED_PRECONDITION.")
async def check_epoch_fence(probe: Probe) -> None:
    handle = await probe.seeded()
    for epoch in (handle.epoch + 1, 0):
        await _out_of_order(probe, f"epoch {epoch} instead of {handle.epoch}", handle.request(epoch=epoch))
    request = handle.request()
    await probe.connection.call(handle.reset_request())
    await _out_of_order(probe, "a Step of the episode before the Reset", request, "check the epoch before the index")


@must(
    "C-38",
    "OUT_OF_ORDER and EPISODE_OVER have expected_epoch and expected_step_index in their metadata.",
)
async def check_expected_place(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=2, max_actions=0))
    actions = probe.actions.choices((await handle.step()).observation)[:1]
    wrong_requests = {
        "other actions": handle.request(actions, ahead=-1),
        "a gap": handle.request(ahead=3),
        "a wrong epoch": handle.request(epoch=handle.epoch + 1),
    }
    for what, request in wrong_requests.items():
        await _expect_place_reported(probe, what, request, handle)
    await handle.step()
    await _expect_place_reported(probe, "a Step after the end", handle.request(), handle)


@must("C-39", "Refused, late and repeated Steps change nothing.")
async def check_refused_steps(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded()
    transitions = []
    for number, turn in enumerate(script.turns):
        await probe.connection.refusal(handle.request(turn, ahead=1))
        await probe.connection.refusal(handle.request(turn, epoch=handle.epoch + 1))
        await probe.connection.refusal(handle.request([pb.Action()]))
        transitions.append(await handle.step(turn))
        await probe.connection.refusal(handle.request(OTHER, ahead=-1))
        if number > 1:
            await probe.connection.refusal(handle.request(script.turns[number - 2], ahead=-3))
    fix = "check the whole call before any change"
    expect_played(script.transitions, transitions, "the episode among refused calls", fix)


@must(
    "C-40",
    "Steps of one session that arrive at once are played in the order of their indices or refused.",
)
async def check_simultaneous_steps(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded()
    got: dict[int, pb.Transition] = {}
    while len(got) < len(script.turns):
        numbers = range(len(got), min(len(got) + 3, len(script.turns)))
        requests = [handle.request(script.turns[number], ahead=number - len(got)) for number in reversed(numbers)]
        replies = await asyncio.gather(
            *(probe.connection.call(request) for request in requests), return_exceptions=True
        )
        count = len(got)
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, grpc.aio.AioRpcError):
                is_refused = reply.code() == grpc.StatusCode.FAILED_PRECONDITION
                expect(is_refused, "FAILED_PRECONDITION for a Step that comes too early", from_error(reply))
            elif isinstance(reply, BaseException):
                raise reply
            else:
                got[request.step_index] = reply.transition
        expect(len(got) > count, "the Step with the next index to be played", "every one refused")
        expect(sorted(got) == list(range(len(got))), "no index left out", sorted(got), "play indices in order")
        handle.index += len(got) - count
    expect_played(script.transitions, [got[number] for number in sorted(got)], "the episode of Steps sent at once")


@must(
    "C-47",
    "A Step after the end is FAILED_PRECONDITION, while the last Step again still has its reply.",
)
async def check_after_the_end(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=1))
    request = handle.request()
    reply: pb.StepResponse = await probe.connection.call(request)
    handle.index += 1
    await _out_of_order(probe, "a Step after the end", handle.request())
    repeat: pb.StepResponse = await probe.connection.call(request)
    expect_same(reply, repeat, "the reply of the last Step again", "keep the last reply until the Reset")


async def _out_of_order(probe: Probe, what: str, request: pb.StepRequest, fix: str = "") -> None:
    await probe.expect_refusal(what, request, "FAILED_PRECONDITION", fix=fix)


async def _expect_place_reported(probe: Probe, what: str, request: pb.StepRequest, handle: Handle) -> None:
    refusal = await probe.connection.refusal(request)
    if refusal is None or refusal.code != "FAILED_PRECONDITION":
        return  # another requirement reports this
    expected = {"expected_epoch": str(handle.epoch), "expected_step_index": str(handle.index)}
    got = {key: refusal.metadata.get(key, "absent") for key in expected}
    expect(got == expected, f"{expected} after {what}", got, "put both into ErrorInfo.metadata")


async def _gather_replies(calls: Any, what: str, fix: str) -> list[Any]:
    """Return the replies of calls sent at the same time. Raise Unmet if one of them is refused."""
    replies = await asyncio.gather(*calls, return_exceptions=True)
    if broken_replies := [reply for reply in replies if isinstance(reply, BrokenCall)]:
        raise broken_replies[0]
    for reply in replies:
        if isinstance(reply, grpc.aio.AioRpcError):
            raise Unmet(f"replies to {what}", str(from_error(reply)), fix)
        if isinstance(reply, BaseException):
            raise reply
    return replies
