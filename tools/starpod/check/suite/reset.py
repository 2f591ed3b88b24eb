"""Reset: a new episode in an open session, exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
from google.protobuf import struct_pb2

from starpod.check.expectations import NotShown, expect, expect_same
from starpod.check.handle import Handle
from starpod.check.options import resolve_references
from starpod.check.probe import DYNAMICS_SEED, SEED, Probe
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

TRIED = 8
"""Maximum number of other option values to try until one of them changes the start state."""


@must(
    "C-50",
    "Reset raises the epoch by one, sets step_index to 0, keeps the session id and reports the seeds.",
)
async def check_reset(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    reply = await _reset(probe, handle, seed=5, dynamics_seed=6)
    session = reply.session
    got = (session.session_id, session.epoch, session.step_index, session.seed, session.dynamics_seed)
    expected = (handle.id, 2, 0, 5, 6)
    expect(got == expected, f"(session_id, epoch, step_index, seed, dynamics_seed) = {expected}", got)
    expect(session.HasField("observation"), "a first observation", "none")
    random_seeds = [(await _reset(probe, handle)).session.seed for _ in range(4)]
    expect(len(set(random_seeds)) > 1, "another seed for each Reset that gives none", random_seeds, "draw it at random")


@must(
    "C-51",
    "Reset with given seeds starts the episode that Open with them starts, whatever was played before.",
)
async def check_same_start_as_open(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded(seed=SEED + 1, dynamics_seed=3)
    await handle.play(script.turns)
    reply = await _reset(probe, handle, seed=SEED, dynamics_seed=DYNAMICS_SEED)
    fix = "keep nothing of the old episode"
    expect_same(script.start.observation, reply.session.observation, "the start that Open gives", fix)
    await probe.expect_script(handle, "the episode after a Reset", fix)


@must("C-52", "The same Reset again, before any Step, has the same reply and keeps the epoch.")
async def check_repeated_reset(probe: Probe) -> None:
    handle = await probe.seeded()
    request = handle.reset_request()
    reply: pb.ResetResponse = await probe.connection.call(request)
    for _ in range(2):
        repeat: pb.ResetResponse = await probe.connection.call(request)
        expect_same(reply, repeat, "the reply of the repeated Reset", "keep it until the first Step of the new epoch")


@must(
    "C-53",
    "Reset with an old epoch is FAILED_PRECONDITION after a Step, or if the request is another; so is a future epoch.",
)
async def check_epoch_fence(probe: Probe) -> None:
    handle = await probe.seeded()
    old_request = handle.reset_request(seed=5)
    await probe.connection.call(old_request)
    other_request = handle.reset_request(seed=6)
    await probe.expect_refusal("another Reset with the old epoch", other_request, "FAILED_PRECONDITION")
    for epoch in (0, handle.epoch + 2):
        wrong_request = pb.ResetRequest(session_id=handle.id, epoch=epoch)
        await probe.expect_refusal(f"Reset with epoch {epoch} at epoch 2", wrong_request, "FAILED_PRECONDITION")
    handle.epoch, handle.index = handle.epoch + 1, 0
    await handle.step()
    what, fix = "a Reset that comes after a Step of the new episode", "a late Reset must not throw an episode away"
    await probe.expect_refusal(what, old_request, "FAILED_PRECONDITION", fix=fix)


@must("C-54", "After the end of an episode Reset starts the next one.")
async def check_after_the_end(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=1))
    await handle.step()
    await _reset(probe, handle)
    transition = await handle.step()
    expect(transition.truncated, "the session's limit max_turns=1 to hold in the new episode", "no end after turn 1")


@must("C-55", "Reset keeps wants and limits if it names none, and replaces them if it does.")
async def check_kept_wants_and_limits(probe: Probe) -> None:
    supports_key = probe.spec.capabilities.state_key
    handle = await probe.seeded(want=pb.Want(state_key=supports_key), limits=pb.LimitOverrides(max_turns=9))
    reply = await _reset(probe, handle)
    has_key = bool(reply.session.observation.state_key) or not supports_key
    expect(has_key, "the state_key that Open asked for", "none after a Reset without `want`")
    expect(reply.limits.max_turns == 9, "max_turns 9 after a Reset without `limits`", reply.limits.max_turns)
    reply = await _reset(probe, handle, want=pb.Want(), limits=pb.LimitOverrides(max_turns=4))
    expect(not reply.session.observation.state_key, "no state_key after a Reset with an empty `want`", "one")
    expect(reply.limits.max_turns == 4, "max_turns 4 after a Reset that says so", reply.limits.max_turns)


@must("C-56", "A Reset that is refused for its options leaves the running episode as it was.")
async def check_refused_reset(probe: Probe) -> None:
    handle, _ = await probe.play_first_turns(1)
    request = handle.reset_request(options=probe.target.options_message(no_such_option=1))
    await probe.expect_refusal("Reset with an unknown option", request, "INVALID_ARGUMENT")
    await probe.expect_script(handle, "the episode after a refused Reset", "validate before anything changes")


@must("C-57", "Reset keeps the options if it names none.")
async def check_options_kept(probe: Probe) -> None:
    probe.target.script()
    usual_reply = await probe.open(seed=SEED)
    for options in _other_options(probe):
        try:
            reply: pb.OpenResponse = await probe.create(probe.open_request(seed=SEED, options=options))
        except grpc.aio.AioRpcError:
            continue  # the schema does not say which values are allowed together
        same_start = reply.sessions[0].observation == usual_reply.sessions[0].observation
        if same_start and reply.instructions == usual_reply.instructions:
            continue
        handle = Handle(probe.connection, reply.sessions[0])
        reset_reply = await _reset(probe, handle, seed=SEED)
        fix = "keep the options with the session"
        what = f"the start with options {dict(options)} after a Reset without options"
        expect_same(reply.sessions[0].observation, reset_reply.session.observation, what, fix)
        what = f"the instructions {reply.instructions[:80]!r} after a Reset without options"
        expect(reply.instructions == reset_reply.instructions, what, reset_reply.instructions[:80], fix)
        return
    raise NotShown("no option is known to change the start or the instructions")


def _other_options(probe: Probe) -> Iterator[struct_pb2.Struct]:
    """Yield options that differ in one value from the options of every session."""
    schema = json.loads(probe.spec.options_schema_json)
    count = 0
    for name, prop in schema.get("properties", {}).items():
        prop = resolve_references(prop, schema)
        base = probe.target.options.get(name, prop.get("default"))
        values = [*prop.get("enum", ())[:3], prop.get("minimum")]
        if prop.get("type") == "boolean":
            values = [not base]
        elif prop.get("type") in ("integer", "number") and base is not None and base < prop.get("maximum", base):
            values.append(min(base + 1, prop["maximum"]))
        for value in values:
            if value is not None and value != base and count < TRIED:
                count += 1
                yield probe.target.options_message(**{name: value})


async def _reset(probe: Probe, handle: Handle, **fields: object) -> pb.ResetResponse:
    request = handle.reset_request(**fields)
    reply: pb.ResetResponse = await probe.connection.call(request)
    handle.epoch, handle.index = reply.session.epoch, reply.session.step_index
    return reply
