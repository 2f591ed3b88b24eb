"""Fork: copies of a live episode."""

from __future__ import annotations

import asyncio
import time

import grpc

from starpod.check.expectations import TooBusy, expect, expect_played, expect_same
from starpod.check.handle import Handle
from starpod.check.probe import Probe, new_key
from starpod.check.refusal import from_error
from starpod.check.requirement import must
from starpod.check.suite.leases import LEASE, PATIENCE, expect_reaped
from starpod.v1 import environment_pb2 as pb

RESEED = pb.FORK_RANDOMNESS_RESEED


@must(
    "F-01",
    "Fork returns `count` copies (0 means 1) with own ids, epoch 1, the original's step_index and present observation.",
)
async def check_copied_sessions(probe: Probe) -> None:
    handle, script = await probe.play_first_turns()
    expect(len(await probe.fork(handle)) == 1, "one copy for count 0", "another number")
    copies = await probe.fork(handle, count=3)
    expect(len(copies) == 3, "three copies", len(copies))
    ids = {handle.id, *(copy.id for copy in copies)}
    expect(len(ids) == 4, "different ids", "the same ids")
    for copy in copies:
        position = (copy.epoch, copy.index)
        expect(position == (1, handle.index), f"(epoch, step_index) = {(1, handle.index)} of a copy", position)
        observation = script.transitions[handle.index - 1].observation
        expect_same(observation, copy.session.observation, "the original's present observation")


@must("F-02", "A copy that keeps its randomness continues exactly as the original would.")
async def check_kept_randomness(probe: Probe) -> None:
    handle, _ = await probe.play_first_turns()
    for randomness in (pb.FORK_RANDOMNESS_KEEP, pb.FORK_RANDOMNESS_UNSPECIFIED):
        copy = (await probe.fork(handle, randomness=randomness))[0]
        fix = "copy the random stream in its present state"
        await probe.expect_script(copy, "the rest of the episode in a copy", fix)


@must("F-03", "A fork and calls to its copies change neither the original nor the other copies.")
async def check_independence(probe: Probe) -> None:
    handle, script = await probe.play_first_turns()
    first, second, third = await probe.fork(handle, count=3)
    await first.step(probe.actions.turn(*script.turns[handle.index] * 2))
    await probe.connection.call(pb.ResetRequest(session_id=second.id, epoch=second.epoch, seed=1))
    for what, other in (("the original", handle), ("another copy", third)):
        what = f"the episode of {what} beside stepped and reset copies"
        await probe.expect_script(other, what, "copy the state deeply")


@must("F-04", "Closing the original leaves its copies alive.")
async def check_copies_after_close(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    copy = (await probe.fork(handle))[0]
    await probe.connection.call(pb.CloseRequest(session_ids=[handle.id]))
    await copy.step()


@must("F-05", "With RESEED each copy uses its given dynamics seed, and the same seed gives the same episode.")
async def check_reseeded_copies(probe: Probe) -> None:
    handle, script = await probe.play_first_turns()
    copies = await probe.fork(handle, count=3, randomness=RESEED, dynamics_seeds=[2**64 - 1, 5, 5])
    seeds = [copy.session.dynamics_seed for copy in copies]
    expect(seeds == [2**64 - 1, 5, 5], "dynamics seeds [2**64 - 1, 5, 5] of the copies", seeds)
    later_copy = (await probe.fork(handle, randomness=RESEED, dynamics_seeds=[5]))[0]
    turns = script.turns[handle.index :]
    plays = [await copy.play(turns) for copy in (copies[1], copies[2], later_copy)]
    fix = "restart the stream from the seed"
    for play in plays[1:]:
        expect_played(plays[0], play, "the episode of copies with one dynamics seed", fix)


@must(
    "F-06",
    "With RESEED and no seeds each copy gets another dynamics seed; the same fork again derives the same ones.",
)
async def check_derived_seeds(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    forks = [await probe.fork(handle, count=3, randomness=RESEED) for _ in range(2)]
    first_seeds, repeated_seeds = ([copy.session.dynamics_seed for copy in copies] for copies in forks)
    seeds = {handle.session.dynamics_seed, *first_seeds}
    expect(len(seeds) == 4, "dynamics seeds that differ from the original's and each other", first_seeds)
    fix = "derive them from the original's, step_index and number"
    expect(first_seeds == repeated_seeds, f"the same derived seeds {first_seeds}", repeated_seeds, fix)


@must("F-07", "Fork with an epoch or step_index that is not current is FAILED_PRECONDITION.")
async def check_stale_place(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    for epoch, index in ((handle.epoch, 0), (handle.epoch, 2), (handle.epoch + 1, 1)):
        request = pb.ForkRequest(session_id=handle.id, epoch=epoch, step_index=index)
        await probe.expect_refusal(f"a Fork at epoch {epoch}, step_index {index}", request, "FAILED_PRECONDITION")


@must(
    "F-08",
    "Fork again with the same key returns the same copies, also at the same time and after the original was "
    "stepped; another request under it is FAILED_PRECONDITION.",
)
async def check_repeated_key(probe: Probe) -> None:
    handle = await probe.seeded()
    request = handle.fork_request(count=2, key=new_key())
    replies = list(await asyncio.gather(*(probe.create(request) for _ in range(4))))
    await handle.step()
    replies.append(await probe.create(request))
    ids = {tuple(session.session_id for session in reply.sessions) for reply in replies}
    fix = "look up the key before checking epoch and step_index"
    expect(len(ids) == 1, "the same two copies from five Forks with one key", f"{len(ids)} pairs", fix)
    request.count = 3
    await probe.expect_refusal("another Fork under the same key", request, "FAILED_PRECONDITION")
    open_request = probe.open_request(key=request.key)
    await probe.expect_refusal("an Open under a Fork's key", open_request, "FAILED_PRECONDITION")


@must("F-09", "dynamics_seeds that are neither none nor one per copy are INVALID_ARGUMENT.")
async def check_seeds_per_copy(probe: Probe) -> None:
    handle = await probe.seeded()
    request = pb.ForkRequest(
        session_id=handle.id, epoch=handle.epoch, step_index=0, count=3, randomness=RESEED, dynamics_seeds=[1, 2]
    )
    await probe.expect_refusal("two seeds for three copies", request, "INVALID_ARGUMENT")


@must("F-10", "Fork of an environment that does not declare it is UNIMPLEMENTED.", absent=True)
async def check_undeclared_capability(probe: Probe) -> None:
    handle = await probe.seeded()
    request = handle.fork_request()
    await probe.expect_refusal("Fork", request, "UNIMPLEMENTED")


@must(
    "F-11",
    "first_member of a Fork numbers the copies, and with RESEED their seeds are derived from that number.",
)
async def check_member_alone(probe: Probe) -> None:
    handle = await probe.seeded()
    await handle.step()
    group = await probe.fork(handle, count=3, randomness=RESEED)
    pair = await probe.fork(handle, count=2, randomness=RESEED, first_member=1)
    expected, got = (
        [(copy.session.member, copy.session.dynamics_seed) for copy in copies] for copies in (group[1:], pair)
    )
    expect(expected == got, f"(member, dynamics_seed) {expected}", got, "derive the seeds from Session.member")


@must("F-12", "A copy has the original's limits, counters and lease.")
async def check_limits_and_lease(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=2))
    await handle.step()
    transition = await (await probe.fork(handle))[0].step()
    expect(transition.truncated, "the end of a copy at the second turn of two", "no end", "copy limits and counters")
    copies = await _copies_with_short_lease(probe)
    await expect_reaped(probe, copies, PATIENCE[1:], "copy", "a copy with the original's lease", "copy the lease")


async def _copies_with_short_lease(probe: Probe) -> list[Handle]:
    """Return two copies of a session with a lease of LEASE seconds, made before the lease ran out."""
    for _ in range(4):
        start = time.monotonic()
        handle = await probe.seeded(lease_seconds=LEASE)
        try:
            return await probe.fork(handle, count=1) + await probe.fork(handle, count=1)
        except grpc.aio.AioRpcError as error:
            if from_error(error).code != "NOT_FOUND" or time.monotonic() - start < LEASE:
                raise
    raise TooBusy


@must("F-13", "A count above max_group is INVALID_ARGUMENT and copies nothing.")
async def check_huge_group(probe: Probe) -> None:
    count = probe.target.beyond_max_group()
    request = (await probe.seeded()).fork_request(count=count)
    await probe.expect_refusal(f"a Fork into {count}", request, "INVALID_ARGUMENT")


@must("F-14", "dynamics_seeds without RESEED are INVALID_ARGUMENT.")
async def check_seeds_without_reseed(probe: Probe) -> None:
    handle = await probe.seeded()
    request = handle.fork_request(count=1, dynamics_seeds=[5])
    await probe.expect_refusal("dynamics_seeds without RESEED", request, "INVALID_ARGUMENT")
