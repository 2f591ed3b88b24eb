"""Open: sessions, groups, seeds, keys, versions and options."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starpod.check.expectations import expect, expect_played, expect_same, needs
from starpod.check.options import resolve_references
from starpod.check.probe import DYNAMICS_SEED, SEED, Probe, new_key
from starpod.check.requirement import must

HUGE = 2**64 - 1


@must(
    "C-06",
    "Open returns `count` sessions (0 means 1) in member order from 0, with epoch 1, step_index 0 and a first "
    "observation.",
)
async def check_group(probe: Probe) -> None:
    single_reply = await probe.open(count=0)
    version = single_reply.environment_version
    expect(version == probe.spec.version, f"version {probe.spec.version}", version)
    sessions = (await probe.open(count=3)).sessions
    members = [session.member for session in sessions]
    expect(members == [0, 1, 2], "members 0, 1, 2 in this order", members, "number the sessions of a group from 0")
    for session in sessions:
        expect(session.epoch == 1, "epoch 1 of a new session", session.epoch)
        expect(session.step_index == 0, "step_index 0 of a new session", session.step_index)
        expect(session.HasField("observation"), "a first observation from Open", "none", "reset in Open itself")


@must("C-07", "Session ids differ from each other and are 1 to 64 bytes of printable ASCII.")
async def check_session_ids(probe: Probe) -> None:
    ids = [handle.id for _ in range(2) for handle in await probe.open_many(4)]
    expect(len(set(ids)) == len(ids), "eight different session ids", ids, "draw them at random")
    for session_id in ids:
        printable = 0 < len(session_id) <= 64 and all(" " <= letter <= "~" for letter in session_id)
        expect(printable, "1 to 64 bytes of printable ASCII", repr(session_id))


@must(
    "C-08",
    "A session reports its seed and dynamics_seed: the given 64-bit values, or else the drawn and derived ones.",
)
async def check_seeds(probe: Probe) -> None:
    for fields in ({"seed": HUGE, "dynamics_seed": HUGE - 1}, {"seed": 0, "dynamics_seed": 0}):
        session = (await probe.open(**fields)).sessions[0]
        got = {"seed": session.seed, "dynamics_seed": session.dynamics_seed}
        fix = "keep seeds as unsigned 64-bit; 0 is a seed like others"
        expect(got == fields, f"{fields} in the Session", got, fix)
    random_seeds = [(await probe.open()).sessions[0].seed for _ in range(4)]
    expect(len(set(random_seeds)) > 1, "another seed for each Open that gives none", random_seeds, "draw it at random")


@must("C-09", "Opening again with a session's seed and dynamics_seed gives the same episode.")
async def check_repeated_open(probe: Probe) -> None:
    script = probe.target.script()
    for fields in ({}, {"seed": SEED}):
        original = await probe.session(**fields)
        copy = await probe.seeded(seed=original.session.seed, dynamics_seed=original.session.dynamics_seed)
        fix = "derive nothing from anything but the seeds"
        expect_same(original.session.observation, copy.session.observation, "the same first observation", fix)
        expect_played(await original.play(script.turns), await copy.play(script.turns), "the episode opened again", fix)


@must("C-10", "The members of a group share the seed and the first observation.")
async def check_common_start(probe: Probe) -> None:
    probe.target.script()
    sessions = (await probe.open(seed=SEED, count=3)).sessions
    seeds = {session.seed for session in sessions}
    expect(seeds == {SEED}, f"seed {SEED} of every member", seeds, "give the members the group's seed")
    for session in sessions[1:]:
        what = f"member {session.member} with the start of member 0"
        expect_same(sessions[0].observation, session.observation, what, "let the start depend only on the seed")


@must(
    "C-11",
    "Each member's dynamics_seed is derived and differs from the others', unless Open gives one for all.",
)
async def check_dynamics_seeds(probe: Probe) -> None:
    groups = [(await probe.open(seed=SEED, count=3)).sessions for _ in range(2)]
    seeds, repeats = ([session.dynamics_seed for session in sessions] for sessions in groups)
    fix = "derive each from the seed and the member"
    expect(len(set(seeds)) == 3, "three different dynamics seeds", seeds, fix)
    expect(seeds == repeats, f"the same derived dynamics seeds again, {seeds}", repeats, "do not draw them at random")
    seeds_received = {
        session.dynamics_seed for session in (await probe.open(seed=SEED, dynamics_seed=7, count=3)).sessions
    }
    expect(
        seeds_received == {7},
        "dynamics seed 7 of every member",
        seeds_received,
        "use a given dynamics_seed as it is",
    )


@must("C-12", "The first observation depends on the seed and not on the dynamics_seed.")
async def check_start_by_seed_alone(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded(dynamics_seed=DYNAMICS_SEED + 1)
    fix = "draw the start from a stream that depends only on the seed"
    expect_same(script.start.observation, handle.session.observation, "the same start with another dynamics seed", fix)


@must("C-13", "Open again with the same key and request returns the same sessions and opens none.")
async def check_same_key(probe: Probe) -> None:
    request = probe.open_request(count=2, seed=SEED, key=new_key())
    first_reply = await probe.create(request)
    second_reply = await probe.create(request)
    expected, got = ([session.session_id for session in reply.sessions] for reply in (first_reply, second_reply))
    expect(expected == got, f"sessions {expected} under the same key", got, "remember the reply by its key")


@must("C-14", "Opens with the same key at the same time return the same sessions.")
async def check_same_key_at_once(probe: Probe) -> None:
    request = probe.open_request(key=new_key())
    replies = await asyncio.gather(*(probe.create(request) for _ in range(6)))
    ids = {reply.sessions[0].session_id for reply in replies}
    expect(len(ids) == 1, "one session from six Opens at once with one key", len(ids), "let later ones wait")


@must("C-15", "Open with the key of another request is FAILED_PRECONDITION.")
async def check_key_reused(probe: Probe) -> None:
    key = new_key()
    await probe.create(probe.open_request(seed=1, key=key))
    other_request = probe.open_request(seed=2, key=key)
    await probe.expect_refusal("another request under the same key", other_request, "FAILED_PRECONDITION")


@must("C-16", "A key of more than 128 bytes is INVALID_ARGUMENT.")
async def check_long_key(probe: Probe) -> None:
    await probe.create(probe.open_request(key=(new_key() * 4)[:128]))
    await probe.expect_refusal("a key of 129 bytes", probe.open_request(key="k" * 129), "INVALID_ARGUMENT")


@must("C-17", "Open of an unknown environment is NOT_FOUND.")
async def check_unknown_environment(probe: Probe) -> None:
    for name in ("no_such_environment-v1", ""):
        request = probe.open_request(environment_id=name, version="")
        codes = ("NOT_FOUND",) if name else ("NOT_FOUND", "INVALID_ARGUMENT")
        await probe.expect_refusal(f"environment {name!r}", request, *codes)


@must(
    "C-18",
    "Open takes the newest version that fits all comparators; if none fits it is NOT_FOUND, if one cannot be "
    "read INVALID_ARGUMENT.",
)
async def check_versions(probe: Probe) -> None:
    version = probe.spec.version
    for pin in (version, f"=={version}", f">={version},<={version}", f">=0.0.0,<={version}"):
        reply = await probe.open(version=pin)
        expect(reply.environment_version == version, f"{version} for {pin!r}", reply.environment_version)
    versions = [spec.version for spec in probe.server.environments if spec.id == probe.spec.id]
    newest = await probe.open(version="")
    expect(newest.environment_version == versions[0], f"the newest version, {versions[0]}", newest.environment_version)
    for pin in (">=999.0.0", f"<{version},>{version}"):
        await probe.expect_refusal(f"version {pin!r}", probe.open_request(version=pin), "NOT_FOUND")
    request = probe.open_request(version="newest please")
    await probe.expect_refusal("version 'newest please'", request, "INVALID_ARGUMENT")


@must("C-19", "An unknown option is INVALID_ARGUMENT.")
async def check_unknown_option(probe: Probe) -> None:
    request = probe.open_request(options=probe.target.options_message(no_such_option=1))
    await probe.expect_refusal("an unknown option", request, "INVALID_ARGUMENT", fix="never ignore an option")


@must("C-20", "An option that its schema does not allow is INVALID_ARGUMENT.")
async def check_wrong_option(probe: Probe) -> None:
    shown = False
    for name, value in _wrong_values(json.loads(probe.spec.options_schema_json)):
        shown = True
        request = probe.open_request(options=probe.target.options_message(**{name: value}))
        await probe.expect_refusal(
            f"option {name}={value!r}", request, "INVALID_ARGUMENT", fix="validate by the schema"
        )
    needs(shown, "the environment has no option whose schema forbids anything")


@must("C-21", "An option at its schema's default opens the same episode as without it.")
async def check_default_options(probe: Probe) -> None:
    script = probe.target.script()
    properties = json.loads(probe.spec.options_schema_json).get("properties", {})
    defaults = {name: prop["default"] for name, prop in properties.items() if prop.get("default") is not None}
    defaults = {name: value for name, value in defaults.items() if name not in probe.target.options}
    needs(defaults, "the environment has no option with a default")
    handle = await probe.seeded(options=probe.target.options_message(**defaults))
    fix = "take whole numbers in a Struct, which knows only doubles, as integers"
    expect_same(script.start.observation, handle.session.observation, f"the same start with options {defaults}", fix)


@must("C-22", "A count above max_group is INVALID_ARGUMENT and opens nothing.")
async def check_huge_group(probe: Probe) -> None:
    for count in {probe.target.beyond_max_group(), 2**32 - 1}:
        request = probe.open_request(count=count)
        fix = "check ServerLimits.max_group before creating the first session"
        await probe.expect_refusal(f"a group of {count}", request, "INVALID_ARGUMENT", fix=fix)


@must(
    "C-23",
    "first_member places the sessions in their group: opened alone, a member has the seeds it has in the group.",
)
async def check_member_alone(probe: Probe) -> None:
    group = (await probe.open(seed=SEED, count=3)).sessions
    pair = (await probe.open(seed=SEED, count=2, first_member=1)).sessions
    members = [session.member for session in pair]
    expect(members == [1, 2], "members 1, 2 with first_member 1", members)
    expected, got = ([session.dynamics_seed for session in sessions] for sessions in (group[1:], pair))
    fix = "derive a member's dynamics seed from the seed and Session.member"
    expect(expected == got, f"the dynamics seeds of members 1 and 2, {expected}", got, fix)


@must("C-24", "A call that fails leaves its key unused.")
async def check_key_after_failure(probe: Probe) -> None:
    key = new_key()
    await probe.connection.refusal(probe.open_request(version=">=999.0.0", key=key))
    refusal = await probe.connection.refusal(good := probe.open_request(key=key))
    expect(refusal is None, "sessions under a key with which only an Open failed before", refusal, "forget failures")
    await probe.create(good)


@must("C-25", "Members that do not fit into 32 bits are INVALID_ARGUMENT.")
async def check_members_beyond(probe: Probe) -> None:
    needs(probe.server.limits.max_group != 1, "the server's max_group is 1")
    request = probe.open_request(count=2, first_member=2**32 - 1)
    await probe.expect_refusal("members 2**32 - 1 and 2**32", request, "INVALID_ARGUMENT")


def _wrong_values(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values that the options' schemas forbid.

    These have a wrong type that no lenient parser could convert, are fractions instead of integers, exceed a bound, or
    are not among the choices.
    """
    for name, prop in schema.get("properties", {}).items():
        types = _types(prop, schema)
        if not types:
            continue
        for kind, value in (
            ("object", {"surely": {"not": ["this"]}}),
            ("array", [{"surely": "not this"}]),
            ("null", None),
        ):
            if kind not in types:
                yield name, value
                break
        prop = resolve_references(prop, schema)
        if "integer" in types and not types & {"number", "string"}:
            yield name, prop.get("minimum", 2) + 0.5
        if types & {"integer", "number"}:
            for bound, offset in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1), ("exclusiveMaximum", 0)):
                if isinstance(prop.get(bound), int | float):
                    yield name, prop[bound] + offset
        if choices := prop.get("enum"):
            yield name, "no such choice" if isinstance(choices[0], str) else 987_654_321


def _types(prop: Any, schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a property allows, or an empty set if the schema does not say."""
    prop = resolve_references(prop, schema)
    if "type" in prop:
        return {prop["type"]} if isinstance(prop["type"], str) else set(prop["type"])
    if "enum" in prop or "const" in prop:
        return {"string"}
    kinds = [_types(choice, schema) for choice in [*prop.get("anyOf", ()), *prop.get("oneOf", ())]]
    return set().union(*kinds) if kinds and all(kinds) else set()
