"""Observations and Render."""

from __future__ import annotations

from typing import Any

from starpod.check.expectations import expect, needs
from starpod.check.probe import SEED, Probe
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

MIMES = {"text": "text/plain; charset=utf-8", "html": "text/html; charset=utf-8", "png": "image/png"}
PNG = b"\x89PNG\r\n\x1a\n"
TRIED = 8


@must(
    "C-60",
    "An observation carries valid_actions, state_key, expert_action and score only if wanted, and after the end no "
    "valid_actions and no expert_action.",
)
async def check_unwanted_fields(probe: Probe) -> None:
    handle = await probe.session(want=pb.Want())
    for observation in (handle.session.observation, (await handle.step()).observation):
        extra = [field.name for field, _ in observation.ListFields() if field.name not in ("parts", "agent_id")]
        expect(not extra, "nothing beyond the parts without a Want", extra, "compute them only when they are wanted")
    can = probe.spec.capabilities
    want = pb.Want(valid_actions=can.valid_actions, expert_action=can.expert_action)
    handle = await probe.seeded(want=want, limits=pb.LimitOverrides(max_turns=1))
    last_observation = (await handle.step()).observation
    expect(not last_observation.valid_actions, "no valid_actions after the end", len(last_observation.valid_actions))
    expect(not last_observation.HasField("expert_action"), "no expert_action after the end", "one")


@must("C-61", "A declared capability is delivered when wanted; to want one that is not declared is UNIMPLEMENTED.")
async def check_wanted_fields(probe: Probe) -> None:
    can = probe.spec.capabilities
    for name in ("valid_actions", "state_key", "expert_action", "score"):
        want = pb.Want(**{name: True})
        if not getattr(can, name):
            await probe.expect_refusal(f"a Want of {name}", probe.open_request(want=want), "UNIMPLEMENTED")
            continue
        observation = (await probe.open(want=want)).sessions[0].observation
        is_present = any(field.name == name for field, _ in observation.ListFields()) or observation.HasField("score")
        # An expert may have no advice in a state.
        fix = "send it or do not declare it"
        expect(is_present or name == "expert_action", f"{name}, which the capabilities declare", "none", fix)


@must("C-62", "Step's own `want` holds for that call only.")
async def check_want_of_one_step(probe: Probe) -> None:
    needs(probe.spec.capabilities.state_key, "the environment has no state_key")
    handle = await probe.session(want=pb.Want())
    first = await handle.step(want=pb.Want(state_key=True))
    second = await handle.step()
    expect(bool(first.observation.state_key), "the state_key that the Step asked for", "none")
    expect(not second.observation.state_key, "no state_key on the next Step", "one", "do not keep a Step's want")


@must(
    "C-63",
    "state_key has 1 to 32 bytes, is equal for equal starts, differs if starts look different, and changes only "
    "with the state.",
)
async def check_state_key(probe: Probe) -> None:
    needs(probe.spec.capabilities.state_key, "the environment has no state_key")
    handle = await probe.session(want=pb.Want(state_key=True), seed=SEED)
    key = handle.session.observation.state_key
    fix = "send a digest of the state, in Python `return digest(text)` with `digest` of starpod.env_server"
    expect(1 <= len(key) <= 32, "a state_key of 1 to 32 bytes", f"{len(key)} bytes", fix)
    for what in ("a turn without an action", "another turn without an action"):
        next_key = (await handle.step()).observation.state_key
        fix = "leave turn counters, session ids and history out of the digest"
        got = f"{next_key.hex()} instead of {key.hex()}"
        expect(next_key == key, f"the state_key to be unchanged after {what}", got, fix)
    if not probe.target.repeats:
        return
    limits = pb.LimitOverrides(max_turns=9, max_actions=9)
    variants: dict[str, dict[str, Any]] = {
        "": {},
        " with another dynamics seed": {"dynamics_seed": 1},
        " with limits": {"limits": limits},
    }
    for what, fields in variants.items():
        new_key = (await probe.seeded(**fields)).session.observation.state_key
        expected = f"the same state_key of the same start in another session{what}"
        expect(new_key == key, expected, new_key.hex(), "digest only the state")
    await probe.clean_up()
    start = (await probe.seeded()).session.observation
    for seed in range(SEED + 1, SEED + 5):
        await probe.clean_up()
        other = (await probe.seeded(seed=seed)).session.observation
        if list(other.parts) != list(start.parts):
            expected = f"another state_key, because the start of seed {seed} looks different"
            expect(other.state_key != start.state_key, expected, other.state_key.hex(), "digest the whole state")


@must("C-64", "Every action in valid_actions is executed and valid.")
async def check_valid_actions(probe: Probe) -> None:
    needs(probe.spec.capabilities.valid_actions, "the environment cannot list its valid actions")
    handle = await probe.session(want=pb.Want(valid_actions=True), seed=SEED)
    actions = handle.session.observation.valid_actions
    step = max(1, len(actions) // TRIED)
    repeats = probe.target.repeats
    for action in actions[::step] if repeats else actions[:1]:
        fresh = await probe.seeded(dynamics_seed=handle.session.dynamics_seed) if repeats else handle
        _expect_valid(await fresh.step([action]), f"the listed {_text(action)}")


@must("C-65", "score is in [0, 1], and is 1 only when the task is solved.")
async def check_score(probe: Probe) -> None:
    needs(probe.spec.capabilities.score, "the environment has no score")
    handle = await probe.session(want=probe.actions.guided_want(score=True), seed=SEED)
    observation, is_solved = handle.session.observation, False
    for _ in range(60):
        expect(0.0 <= observation.score <= 1.0, "a score in [0, 1]", observation.score)
        expect(observation.score < 1.0 or is_solved, "a score below 1 of an unsolved task", observation.score)
        if is_solved:
            return
        transition = await handle.step([probe.actions.guide(observation)])
        observation, is_solved = transition.observation, transition.success
        if transition.end_reason and not is_solved:
            break
    expect(0.0 <= observation.score < 1.0, "a score in [0, 1) of a task that is not solved", observation.score)


@must("C-66", "Every expert_action is executed and valid.")
async def check_expert_actions(probe: Probe) -> None:
    needs(probe.spec.capabilities.expert_action, "the environment has no expert")
    has_expert = False
    for seed in range(2):
        handle = await probe.session(want=pb.Want(expert_action=True), seed=seed)
        observation = handle.session.observation
        for _ in range(40):
            if not observation.HasField("expert_action"):
                break
            has_expert = True
            transition = await handle.step([observation.expert_action])
            _expect_valid(transition, f"the expert's {_text(observation.expert_action)}")
            observation = transition.observation
            if transition.end_reason:
                break
    expect(has_expert, "an expert_action in the first observation of at least one of two episodes", "none")


@must("C-67", "Render draws every mode of render_modes with its media type, and text for an empty mode.")
async def check_render(probe: Probe) -> None:
    handle = await probe.seeded()
    modes = list(probe.spec.render_modes)
    expect("text" in modes, "the render mode text", modes)
    for mode in ["", *modes]:
        reply: pb.RenderResponse = await probe.connection.call(pb.RenderRequest(session_id=handle.id, mode=mode))
        expected = MIMES.get(mode or "text", reply.mime)
        expect(reply.mime == expected, f"mime {expected!r} for mode {mode!r}", repr(reply.mime))
        expect(len(reply.data) > 0, f"a frame in mode {mode!r}", "no data")
        if mode == "png":
            expect(reply.data.startswith(PNG), "data that begin as a PNG does", reply.data[:8])


@must("C-68", "Render in a mode that render_modes lacks is INVALID_ARGUMENT.")
async def check_unknown_mode(probe: Probe) -> None:
    handle = await probe.seeded()
    request = pb.RenderRequest(session_id=handle.id, mode="hologram")
    await probe.expect_refusal("the render mode 'hologram'", request, "INVALID_ARGUMENT")


@must("C-69", "Render changes nothing.")
async def check_render_changes_nothing(probe: Probe) -> None:
    async def render_all(_: object) -> None:
        for mode in probe.spec.render_modes:
            await probe.connection.call(pb.RenderRequest(session_id=handle.id, mode=mode))

    probe.target.script()
    handle = await probe.seeded()
    fix = "draw from the state, and never from its streams"
    await probe.expect_script(handle, "the episode with frames drawn", fix, before=render_all)


@must("C-70", "A Want of image adds an image part, which is the frame that Render draws in mode png.")
async def check_image(probe: Probe) -> None:
    needs("png" in probe.spec.render_modes, "the environment draws no png")
    handle = await probe.session(want=pb.Want(image=True))
    frame: pb.RenderResponse = await probe.connection.call(pb.RenderRequest(session_id=handle.id, mode="png"))
    images = [part.image for part in handle.session.observation.parts if part.HasField("image")]
    is_present = pb.Image(mime="image/png", data=frame.data) in images
    expect(is_present, "the frame of mode png among the parts", f"{len(images)} images, none of them the frame")


def _expect_valid(transition: pb.Transition, what: str) -> None:
    outcome = transition.outcomes[0]
    got = f"executed={outcome.executed}, valid={outcome.valid}"
    expect(outcome.executed and outcome.valid, f"executed=True, valid=True of {what}", got)


def _text(action: pb.Action) -> str:
    return repr(action.text) if action.HasField("text") else str(action).strip()
