"""Transitions: rewards, outcomes of sub-actions, limits and ends of episodes."""

from __future__ import annotations

import functools
import math

import grpc

from starpod.check.expectations import NotShown, Unmet, expect, expect_played, expect_same, needs
from starpod.check.handle import Handle
from starpod.check.probe import UNLIMITED, Probe
from starpod.check.refusal import from_error
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

GUIDED_TURNS = 60
"""Maximum number of turns that a guide plays to reach the end of an episode."""
TRIED = 8
"""Maximum number of seeds to try, because the only action that a test plays may happen to end the task."""


@must(
    "C-41",
    "A Step has one outcome per sub-action; its reward is finite and the sum of theirs, and of reward_parts "
    "where given.",
)
async def check_rewards(probe: Probe) -> None:
    handle = await probe.session(want=probe.actions.want())
    observation = handle.session.observation
    for count in (1, 2, 0, 3):
        actions = probe.actions.turn(*(list(probe.actions.choices(observation)) * 3)[:count])
        transition = await handle.step(actions)
        _check_rewards(transition, len(actions))
        observation = transition.observation
        if transition.end_reason:
            return


@must(
    "C-42",
    "Sub-actions after the end of the episode, or beyond a limit, have executed=false and earn nothing.",
)
async def check_actions_after_end(probe: Probe) -> None:
    limits = pb.LimitOverrides(max_turns=0, max_actions_per_turn=1, max_actions=0)
    handle = await probe.session(want=probe.actions.want(), limits=limits)
    action = probe.actions.choices(handle.session.observation)[0]
    actions = probe.actions.turn(action, action, action)
    needs(len(actions) > 1, "the server takes one sub-action in a Step")
    transition = await handle.step(actions)
    flags = [outcome.executed for outcome in transition.outcomes]
    expected = [True, False, False][: len(actions)]
    expect(flags == expected, f"executed {expected} with max_actions_per_turn=1", flags)
    rewards = [outcome.reward for outcome in transition.outcomes[1:]]
    expect(not any(rewards), "no reward for sub-actions that were not executed", rewards)
    await _expect_nothing_after_the_end(probe)


async def _expect_nothing_after_the_end(probe: Probe) -> None:
    """Expect that sub-actions after the end of the task are not executed, if the guide reaches the end."""
    if not probe.target.repeats:
        return
    handle = await probe.seeded(want=probe.actions.guided_want())
    actions = [probe.actions.guide(handle.session.observation)]
    while not (transition := await handle.step([actions[-1]])).end_reason:
        if len(actions) == GUIDED_TURNS:
            return
        actions.append(probe.actions.guide(transition.observation))
    new_handle = await probe.seeded()
    for action in actions[:-1]:
        await new_handle.step([action])
    last_transition = await new_handle.step([actions[-1], actions[-1]])
    got = [(outcome.executed, outcome.reward) for outcome in last_transition.outcomes[1:]]
    expect(got == [(False, 0.0)], "executed=False and reward 0 after the sub-action that ends the episode", got)


@must("C-43", "max_turns truncates the episode with END_REASON_MAX_TURNS; a turn without an action counts.")
async def check_max_turns(probe: Probe) -> None:
    reply = await probe.open(limits=pb.LimitOverrides(max_turns=2, max_actions=0))
    expect(reply.limits.max_turns == 2, "max_turns 2 in OpenResponse.limits", reply.limits.max_turns)
    handle = Handle(probe.connection, reply.sessions[0])
    first, second = await handle.step(), await handle.step()
    expect(not first.truncated and not first.terminated, "an open episode after turn 1 of 2", _end(first))
    expect(_end(second) == "truncated, END_REASON_MAX_TURNS", "truncated, END_REASON_MAX_TURNS", _end(second))


@must(
    "C-44",
    "max_actions truncates the episode with END_REASON_MAX_ACTIONS once that many sub-actions were executed.",
)
async def check_max_actions(probe: Probe) -> None:
    for seed in range(8):
        limits = pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=1)
        reply = await probe.open(want=probe.actions.want(), limits=limits, seed=seed)
        handle = Handle(probe.connection, reply.sessions[0])
        empty_turn = await handle.step()
        expect(not empty_turn.end_reason, "an empty turn to use up no action", _end(empty_turn))
        action = probe.actions.choices(handle.session.observation)[0]
        transition = await handle.step(actions := probe.actions.turn(action, action))
        flags = [outcome.executed for outcome in transition.outcomes]
        expected_of_each = [True, False][: len(actions)]
        expect(flags == expected_of_each, f"executed {expected_of_each} with max_actions=1", flags)
        if transition.end_reason not in (pb.END_REASON_TERMINAL, pb.END_REASON_ENVIRONMENT_LIMIT):
            expected = "truncated, END_REASON_MAX_ACTIONS"
            expect(_end(transition) == expected, expected, _end(transition), "count executed sub-actions")
            return
    raise NotShown("one action ends the episode")


@must(
    "C-45",
    "Limit overrides replace single fields: absent ones keep theirs and 0 lifts one.",
)
async def check_limit_overrides(probe: Probe) -> None:
    defaults = probe.spec.limits
    limits = (await probe.open(limits=None)).limits
    expect_same(defaults, limits, "OpenResponse.limits without overrides as in the EnvironmentSpec")
    for field in ("max_turns", "max_actions_per_turn", "max_actions"):
        for value in (7, 0):
            expected = pb.Limits()
            expected.CopyFrom(defaults)
            setattr(expected, field, value)
            reply = await probe.open(limits=pb.LimitOverrides(**{field: value}))
            expect_same(expected, reply.limits, f"OpenResponse.limits after {field}={value}", "use field presence")


@must(
    "C-46",
    "terminated and truncated are never set together; end_reason is set exactly with one of them, and agrees.",
)
async def check_end_flags(probe: Probe) -> None:
    for limits in (UNLIMITED, pb.LimitOverrides(max_turns=6)):
        handle = await probe.seeded(want=probe.actions.guided_want(), limits=limits)
        observation = handle.session.observation
        for _ in range(GUIDED_TURNS):
            transition = await handle.step([probe.actions.guide(observation)])
            _check_end(transition)
            observation = transition.observation
            if transition.end_reason:
                break


@must(
    "C-48",
    "An action that makes no sense is an outcome with valid=false; a name that ActionSpace.names lacks is "
    "not executed.",
)
async def check_invalid_action(probe: Probe) -> None:
    space = probe.spec.action_space
    handle = await probe.seeded()
    for action in probe.actions.nonsense():
        transition = await _played(handle, action, "an action of nonsense")
        outcome = transition.outcomes[0]
        got = f"executed={outcome.executed}, valid={outcome.valid}"
        if space.names and action.HasField("text"):
            expected = "executed=False, valid=False"
            fix = "ignore case in names; never raise on a policy's text"
            expect(got == expected, f"{expected} of an unknown name", got, fix)
        if transition.end_reason:
            return
    if space.names:
        name = space.names[0].swapcase()
        transition = await _played(handle, pb.Action(text=name), f"the action {name!r}")
        expected = f"{name!r} to be executed as {space.names[0]!r}"
        expect(transition.outcomes[0].executed, expected, "executed=False", "ignore case in names")


@must(
    "C-49",
    "A well-formed action of an unknown kind is an outcome with valid=false or INVALID_ARGUMENT, and changes nothing.",
)
async def check_foreign_kinds(probe: Probe) -> None:
    script = probe.target.script()
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
            refused = error.code() == grpc.StatusCode.INVALID_ARGUMENT
            expect(refused, f"an outcome or INVALID_ARGUMENT for {what}", from_error(error), "never raise on an action")
            await handle.step()
        else:
            if transition.outcomes[0].valid or transition.outcomes[0].executed:
                continue  # it understood the action, which may have changed the episode
        other_handle = await probe.seeded()
        await other_handle.step()
        fix = "refuse it before anything changes, or let it be a turn without an action"
        plays = await other_handle.play(script.turns), await handle.play(script.turns)
        expect_played(*plays, f"the episode after {what}", fix)


@must("C-58", "If one turn meets several limits, END_REASON_MAX_ACTIONS takes precedence over END_REASON_MAX_TURNS.")
async def check_limit_precedence(probe: Probe) -> None:
    limits = pb.LimitOverrides(max_turns=1, max_actions_per_turn=0, max_actions=1)
    for seed in range(TRIED):
        reply = await probe.open(want=probe.actions.want(), limits=limits, seed=seed)
        handle = Handle(probe.connection, reply.sessions[0])
        transition = await handle.step([probe.actions.choices(handle.session.observation)[0]])
        if transition.end_reason not in (pb.END_REASON_TERMINAL, pb.END_REASON_ENVIRONMENT_LIMIT):
            got = pb.EndReason.Name(transition.end_reason)
            fix = "check the limit on actions before that on turns"
            expect(got == "END_REASON_MAX_ACTIONS", "END_REASON_MAX_ACTIONS if both limits are met", got, fix)
            return
    raise NotShown("one action ends the episode")


@must("C-59", "An episode that a limit cut short is not a success.")
async def check_truncated_success(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=1))
    transition = await handle.step()
    expect(not transition.success, "success false or absent after MAX_TURNS", "true", "a limit solves no task")


def _check_rewards(transition: pb.Transition, count: int) -> None:
    expect(len(transition.outcomes) == count, f"{count} outcomes for {count} sub-actions", len(transition.outcomes))
    expect(math.isfinite(transition.reward), "a finite reward", transition.reward)
    is_reward = functools.partial(math.isclose, transition.reward, rel_tol=1e-6, abs_tol=1e-6)
    total, fix = math.fsum(outcome.reward for outcome in transition.outcomes), "add up the sub-actions' rewards"
    expect(is_reward(total), f"reward {transition.reward} to be the sum of the outcomes'", total, fix)
    if transition.reward_parts:
        parts = math.fsum(transition.reward_parts.values())
        expect(is_reward(parts), f"reward_parts that sum to {transition.reward}", parts)


def _check_end(transition: pb.Transition) -> None:
    both = transition.terminated and transition.truncated
    expect(not both, "terminated or truncated or neither", "both", "a limit counts only while the task is open")
    is_over = transition.terminated or transition.truncated
    got = _end(transition)
    expect(is_over == bool(transition.end_reason), "end_reason exactly at the end", got, "set end_reason with the flag")
    agrees = transition.terminated == (transition.end_reason == pb.END_REASON_TERMINAL)
    expect(agrees, "END_REASON_TERMINAL exactly if terminated", got)
    if not is_over:
        expect(not transition.HasField("success"), "no success while the episode is open", transition.success)


def _end(transition: pb.Transition) -> str:
    flags = [name for name in ("terminated", "truncated") if getattr(transition, name)]
    return ", ".join([*(flags or ["neither"]), pb.EndReason.Name(transition.end_reason)])


async def _played(handle: Handle, action: pb.Action, what: str) -> pb.Transition:
    try:
        return await handle.step([action])
    except grpc.aio.AioRpcError as error:
        raise Unmet(f"an outcome for {what}", str(from_error(error)), "a policy learns from it: do not fail") from error
