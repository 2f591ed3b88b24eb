"""Step: exactly once, in order, whatever is repeated, late or out of place."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc

from starpod.check.probe import UNLIMITED, Handle, Probe, Turn, expect_played, expect_same
from starpod.check.refusal import from_error
from starpod.check.requirement import NotShown, Unmet, expect, must
from starpod.v1 import environment_pb2 as pb

OTHER = (pb.Action(text="another action"),)
GUIDED = 60
"""Turns in which a guide may find the end."""


@must("C-30", "A Step answers with a transition of one observation and with the index after its own.")
async def plain(probe: Probe) -> None:
    if probe.target.unplayed is not None:
        raise probe.target.unplayed
    handle = await probe.seeded(want=probe.acting_want())
    observation = handle.session.observation
    for turn in ((), (), None):
        actions = (probe.choices(observation)[0],) if turn is None else turn
        reply: pb.StepResponse = await probe.link.call("Step", handle.request(actions))
        expect(reply.HasField("transition"), "a transition", "none")
        expect(reply.transition.HasField("observation"), "an observation in the transition", "none")
        handle.index += 1
        expect(reply.next_step_index == handle.index, f"next_step_index {handle.index}", reply.next_step_index)
        observation = reply.transition.observation


@must("C-31", "The same Step again has the same reply.")
async def repeated(probe: Probe) -> None:
    handle = await probe.seeded()
    observation = handle.session.observation
    for actions in ((), tuple(probe.choices(observation)[:1])):
        request = handle.request(actions)
        first: pb.StepResponse = await probe.link.call("Step", request)
        for _ in range(2):
            again: pb.StepResponse = await probe.link.call("Step", request)
            expect_same(first, again, "the reply of the repeated Step", "keep the last reply of each session")
        handle.index += 1


@must("C-32", "A repeated Step is not played again: an episode whose every Step is sent twice comes out undisturbed.")
async def repeated_throughout(probe: Probe) -> None:
    script = probe.script()
    handle = await probe.seeded()
    got = []
    for turn in script.turns:
        request = handle.request(turn)
        reply: pb.StepResponse = await probe.link.call("Step", request)
        await probe.link.refusal("Step", request)
        got.append(reply.transition)
        handle.index += 1
    mend = "answer the last index from the cache, without stepping"
    expect_played(script.transitions, got, "the episode with every Step sent twice", mend)


@must("C-33", "The same Step sent many times at once is played once, and every copy has the same reply.")
async def repeated_at_once(probe: Probe) -> None:
    links = [probe.link, probe.second_link()]
    handle = await probe.seeded()
    turns: list[Turn] = [(), tuple(probe.choices(handle.session.observation)[:1])]
    expected: list[pb.Transition] = []
    if probe.target.repeats:
        script = probe.script()
        turns, expected = list(script.turns), list(script.transitions)
    for number, turn in enumerate(turns):
        request = handle.request(turn)
        calls = (links[copy % 2].call("Step", request) for copy in range(6))
        mend = "give each session a lock and look into the cache inside it"
        replies = await _all(calls, f"six copies of turn {number} at once", mend)
        for reply in replies:
            expect_same(replies[0], reply, f"the reply of each copy of turn {number}", mend)
        if expected:
            expect_played(expected[number : number + 1], [replies[0].transition], f"turn {number}", mend)
        handle.index += 1


@must("C-34", "The last index with other actions is FAILED_PRECONDITION.")
async def other_actions(probe: Probe) -> None:
    handle = await probe.seeded()
    other = probe.choices((await handle.step()).observation)[:1]
    mend = "compare the actions with those of the cached reply"
    await _out_of_order(probe, "the last index with other actions", handle.request(other, ahead=-1), mend)


@must("C-35", "An index ahead of the next one is FAILED_PRECONDITION.")
async def gap(probe: Probe) -> None:
    handle = await probe.seeded()
    for ahead in (1, 2, 256, 65_536):
        await _out_of_order(probe, f"an index {ahead} too high", handle.request(ahead=ahead))


@must("C-36", "An index before the last one is FAILED_PRECONDITION, even with the actions that were played there.")
async def late(probe: Probe) -> None:
    handle = await probe.seeded()
    late = handle.request()
    await handle.step()
    await handle.step()
    await _out_of_order(probe, "a Step that comes two turns late", late)


@must("C-37", "An epoch other than the current one is FAILED_PRECONDITION.")
async def fenced(probe: Probe) -> None:
    handle = await probe.seeded()
    for epoch in (handle.epoch + 1, 0):
        await _out_of_order(probe, f"epoch {epoch} instead of {handle.epoch}", handle.request(epoch=epoch))
    old = handle.request()
    await probe.link.call("Reset", pb.ResetRequest(session_id=handle.id, epoch=handle.epoch))
    await _out_of_order(probe, "a Step of the episode before the Reset", old, "check the epoch before the index")


@must(
    "C-38",
    "OUT_OF_ORDER and EPISODE_OVER tell expected_epoch and expected_step_index in the metadata of their ErrorInfo.",
)
async def expected_place(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=2, max_actions=0))
    other = probe.choices((await handle.step()).observation)[:1]
    wrong = {
        "other actions": handle.request(other, ahead=-1),
        "a gap": handle.request(ahead=3),
        "a wrong epoch": handle.request(epoch=handle.epoch + 1),
    }
    for what, request in wrong.items():
        await _place_told(probe, what, request, handle)
    await handle.step()
    await _place_told(probe, "a Step after the end", handle.request(), handle)


@must("C-39", "Refused, late and repeated Steps change nothing: the episode around them comes out undisturbed.")
async def noise(probe: Probe) -> None:
    script = probe.script()
    handle = await probe.seeded()
    got = []
    for number, turn in enumerate(script.turns):
        await probe.link.refusal("Step", handle.request(turn, ahead=1))
        await probe.link.refusal("Step", handle.request(turn, epoch=handle.epoch + 1))
        await probe.link.refusal("Step", handle.request([pb.Action()]))
        got.append(await handle.step(turn))
        await probe.link.refusal("Step", handle.request(OTHER, ahead=-1))
        if number > 1:
            await probe.link.refusal("Step", handle.request(script.turns[number - 2], ahead=-3))
    mend = "check a call whole before anything changes"
    expect_played(script.transitions, got, "the episode among refused calls", mend)


@must(
    "C-40",
    "Steps of one session that arrive at once are played in the order of their indices or refused, never mixed.",
)
async def at_once(probe: Probe) -> None:
    script = probe.script()
    handle = await probe.seeded()
    got: dict[int, pb.Transition] = {}
    while len(got) < len(script.turns):
        ahead = range(len(got), min(len(got) + 3, len(script.turns)))
        requests = [handle.request(script.turns[number], ahead=number - len(got)) for number in reversed(ahead)]
        replies = await asyncio.gather(
            *(probe.link.call("Step", request) for request in requests), return_exceptions=True
        )
        before = len(got)
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, grpc.aio.AioRpcError):
                fine = reply.code() == grpc.StatusCode.FAILED_PRECONDITION
                expect(fine, "FAILED_PRECONDITION for a Step that comes too early", from_error(reply))
            elif isinstance(reply, BaseException):
                raise reply
            else:
                got[request.step_index] = reply.transition
        expect(len(got) > before, "the Step with the next index to be played", "every one refused")
        expect(sorted(got) == list(range(len(got))), "no index left out", sorted(got), "play indices in order")
        handle.index += len(got) - before
    expect_played(script.transitions, [got[number] for number in sorted(got)], "the episode of Steps sent at once")


@must(
    "C-41",
    "A Step has one outcome per sub-action, its reward is finite and the sum of theirs, and reward_parts sum to "
    "it where given.",
)
async def rewards(probe: Probe) -> None:
    handle = Handle(probe.link, (await probe.open(want=probe.acting_want())).sessions[0])
    observation = handle.session.observation
    for count in (1, 2, 0, 3):
        actions = probe.turn(*(list(probe.choices(observation)) * 3)[:count])
        transition = await handle.step(actions)
        _check_rewards(transition, len(actions))
        observation = transition.observation
        if transition.end_reason:
            return


@must(
    "C-42",
    "Sub-actions after the one that ends the episode, or beyond a limit, have executed=false and earn nothing.",
)
async def not_executed(probe: Probe) -> None:
    limits = pb.LimitOverrides(max_turns=0, max_actions_per_turn=1, max_actions=0)
    handle = Handle(probe.link, (await probe.open(want=probe.acting_want(), limits=limits)).sessions[0])
    action = probe.choices(handle.session.observation)[0]
    actions = probe.turn(action, action, action)
    if len(actions) == 1:
        raise NotShown("the server takes one sub-action in a Step")
    transition = await handle.step(actions)
    executed = [outcome.executed for outcome in transition.outcomes]
    expected = [True, False, False][: len(actions)]
    expect(executed == expected, f"executed {expected} with max_actions_per_turn=1", executed)
    earned = [outcome.reward for outcome in transition.outcomes[1:]]
    expect(not any(earned), "no reward for what was not executed", earned)
    await _after_the_last(probe)


async def _after_the_last(probe: Probe) -> None:
    """What comes after the sub-action that ends a task, where the guide finds the end and the episode repeats."""
    if not probe.target.repeats:
        return
    guided = await probe.seeded(want=probe.guided_want())
    actions = [probe.guide(guided.session.observation)]
    while not (transition := await guided.step([actions[-1]])).end_reason:
        if len(actions) == GUIDED:
            return
        actions.append(probe.guide(transition.observation))
    again = await probe.seeded()
    for action in actions[:-1]:
        await again.step([action])
    last = await again.step([actions[-1], actions[-1]])
    told = [(outcome.executed, outcome.reward) for outcome in last.outcomes[1:]]
    expect(told == [(False, 0.0)], "executed=False and reward 0 after the sub-action that ends the episode", told)


@must("C-43", "max_turns ends the episode as truncated with END_REASON_MAX_TURNS; a turn without an action counts.")
async def max_turns(probe: Probe) -> None:
    reply = await probe.open(limits=pb.LimitOverrides(max_turns=2, max_actions=0))
    expect(reply.limits.max_turns == 2, "max_turns 2 in OpenResponse.limits", reply.limits.max_turns)
    handle = Handle(probe.link, reply.sessions[0])
    first, second = await handle.step(), await handle.step()
    expect(not first.truncated and not first.terminated, "an open episode after turn 1 of 2", _end(first))
    expect(_end(second) == "truncated, END_REASON_MAX_TURNS", "truncated, END_REASON_MAX_TURNS", _end(second))


@must(
    "C-44",
    "max_actions ends the episode as truncated with END_REASON_MAX_ACTIONS once so many sub-actions were executed.",
)
async def max_actions(probe: Probe) -> None:
    for seed in range(8):
        limits = pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=1)
        reply = await probe.open(want=probe.acting_want(), limits=limits, seed=seed)
        handle = Handle(probe.link, reply.sessions[0])
        empty = await handle.step()
        expect(not empty.end_reason, "an empty turn to use up no action", _end(empty))
        action = probe.choices(handle.session.observation)[0]
        transition = await handle.step(actions := probe.turn(action, action))
        executed = [outcome.executed for outcome in transition.outcomes]
        expected_of_each = [True, False][: len(actions)]
        expect(executed == expected_of_each, f"executed {expected_of_each} with max_actions=1", executed)
        if transition.end_reason not in (pb.END_REASON_TERMINAL, pb.END_REASON_ENVIRONMENT_LIMIT):
            expected = "truncated, END_REASON_MAX_ACTIONS"
            expect(_end(transition) == expected, expected, _end(transition), "count executed sub-actions")
            return
    raise NotShown("one action ends the episode")


@must(
    "C-45",
    "Limit overrides replace the environment's limits field by field: absent fields keep theirs and 0 lifts one.",
)
async def overrides(probe: Probe) -> None:
    own = probe.spec.limits
    untouched = (await probe.open(limits=None)).limits
    expect_same(own, untouched, "OpenResponse.limits without overrides as in the EnvironmentSpec")
    for field in ("max_turns", "max_actions_per_turn", "max_actions"):
        for value in (7, 0):
            expected = pb.Limits()
            expected.CopyFrom(own)
            setattr(expected, field, value)
            reply = await probe.open(limits=pb.LimitOverrides(**{field: value}))
            expect_same(expected, reply.limits, f"OpenResponse.limits after {field}={value}", "use field presence")


@must(
    "C-46",
    "terminated and truncated are never set together, end_reason is set exactly if one of them is, and agrees with it.",
)
async def ends(probe: Probe) -> None:
    for limits in (UNLIMITED, pb.LimitOverrides(max_turns=6)):
        handle = await probe.seeded(want=probe.guided_want(), limits=limits)
        observation = handle.session.observation
        for _ in range(GUIDED):
            transition = await handle.step([probe.guide(observation)])
            _check_end(transition)
            observation = transition.observation
            if transition.end_reason:
                break


@must(
    "C-47",
    "A Step after the end of the episode is FAILED_PRECONDITION, while the last Step again still has its reply.",
)
async def after_the_end(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=1))
    last = handle.request()
    first: pb.StepResponse = await probe.link.call("Step", last)
    handle.index += 1
    await _out_of_order(probe, "a Step after the end", handle.request())
    again: pb.StepResponse = await probe.link.call("Step", last)
    expect_same(first, again, "the reply of the last Step again", "keep the last reply until the Reset")


@must(
    "C-48",
    "An action that makes no sense is an outcome with valid=false, not an error; a name that ActionSpace.names "
    "lacks is not executed.",
)
async def invalid_action(probe: Probe) -> None:
    space = probe.spec.action_space
    handle = await probe.seeded()
    for action in probe.nonsense():
        transition = await _played(handle, action, "an action of nonsense")
        outcome = transition.outcomes[0]
        told = f"executed={outcome.executed}, valid={outcome.valid}"
        if space.names and action.HasField("text"):
            mend = "match names without regard to case; never raise on what a policy wrote"
            expect(told == "executed=False, valid=False", "executed=False, valid=False of an unknown name", told, mend)
        if transition.end_reason:
            return
    if space.names:
        name = space.names[0].swapcase()
        transition = await _played(handle, pb.Action(text=name), f"the action {name!r}")
        expected = f"{name!r} to be executed as {space.names[0]!r}"
        expect(transition.outcomes[0].executed, expected, "executed=False", "match names without regard to case")


@must(
    "C-49",
    "A well-formed action of a kind that the environment does not know is an outcome with valid=false or "
    "INVALID_ARGUMENT, and changes nothing.",
)
async def foreign_kinds(probe: Probe) -> None:
    script = probe.script()
    space = probe.spec.action_space
    kinds: dict[str, pb.Action] = {"a JSON action": pb.Action(json='{"no": ["such", "action"]}')}
    if not space.HasField("tensor"):
        kinds["a tensor action"] = pb.Action(tensor=pb.Tensor(dtype="float32", shape=[2], data=bytes(8)))
    if not space.tools:
        kinds["a tool call"] = pb.Action(tool_call=pb.ToolCall(name="no_such_tool", arguments_json="{}"))
    for what, action in kinds.items():
        handle = await probe.seeded()
        try:
            transition = await handle.step([action])
        except grpc.aio.AioRpcError as error:
            fine = error.code() == grpc.StatusCode.INVALID_ARGUMENT
            expect(fine, f"an outcome or INVALID_ARGUMENT for {what}", from_error(error), "never raise on an action")
            await handle.step()
        else:
            if transition.outcomes and transition.outcomes[0].valid:
                continue  # it does know the kind
            if transition.outcomes[0].executed:
                continue  # tried and found bad: what that costs is the environment's business
        twin = await probe.seeded()
        await twin.step()
        mend = "refuse it before anything changes, or let it be a turn without an action"
        plays = await twin.play(script.turns), await handle.play(script.turns)
        expect_played(*plays, f"the episode after {what}", mend)


def _check_rewards(transition: pb.Transition, count: int) -> None:
    expect(len(transition.outcomes) == count, f"{count} outcomes for {count} sub-actions", len(transition.outcomes))
    expect(math.isfinite(transition.reward), "a finite reward", transition.reward)
    total = math.fsum(outcome.reward for outcome in transition.outcomes)
    close = math.isclose(total, transition.reward, rel_tol=1e-6, abs_tol=1e-6)
    expect(
        close, f"reward {transition.reward} to be the sum of the outcomes'", total, "add up the sub-actions' rewards"
    )
    if transition.reward_parts:
        parts = math.fsum(transition.reward_parts.values())
        close = math.isclose(parts, transition.reward, rel_tol=1e-6, abs_tol=1e-6)
        expect(close, f"reward_parts that sum to {transition.reward}", parts)


def _check_end(transition: pb.Transition) -> None:
    both = transition.terminated and transition.truncated
    expect(not both, "terminated or truncated or neither", "both", "a limit counts only while the task is open")
    over = transition.terminated or transition.truncated
    told = _end(transition)
    expect(over == bool(transition.end_reason), "end_reason exactly at the end", told, "set end_reason with the flag")
    agrees = transition.terminated == (transition.end_reason == pb.END_REASON_TERMINAL)
    expect(agrees, "END_REASON_TERMINAL exactly if terminated", told)
    if not over:
        expect(not transition.HasField("success"), "no success while the episode is open", transition.success)


def _end(transition: pb.Transition) -> str:
    flags = [name for name in ("terminated", "truncated") if getattr(transition, name)]
    return ", ".join([*(flags or ["neither"]), pb.EndReason.Name(transition.end_reason)])


async def _played(handle: Handle, action: pb.Action, what: str) -> pb.Transition:
    try:
        return await handle.step([action])
    except grpc.aio.AioRpcError as error:
        raise Unmet(f"an outcome for {what}", str(from_error(error)), "a policy learns from it: do not fail") from error


async def _out_of_order(probe: Probe, what: str, request: pb.StepRequest, mend: str = "") -> None:
    await probe.refused(what, "Step", request, "FAILED_PRECONDITION", mend=mend)


async def _place_told(probe: Probe, what: str, request: pb.StepRequest, handle: Handle) -> None:
    refusal = await probe.link.refusal("Step", request)
    if refusal is None or refusal.code != "FAILED_PRECONDITION":
        return  # another requirement's failure
    expected = {"expected_epoch": str(handle.epoch), "expected_step_index": str(handle.index)}
    told = {key: refusal.metadata.get(key, "absent") for key in expected}
    expect(told == expected, f"{expected} after {what}", told, "put both into ErrorInfo.metadata")


async def _all(calls: Any, what: str, mend: str) -> list[Any]:
    """The replies of calls sent at once, none of which may be refused."""
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for reply in replies:
        if isinstance(reply, grpc.aio.AioRpcError):
            raise Unmet(f"replies to {what}", str(from_error(reply)), mend)
        if isinstance(reply, BaseException):
            raise reply
    return replies
