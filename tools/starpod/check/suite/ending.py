"""Ends of episodes that limits bring."""

from __future__ import annotations

from starpod.check.probe import Handle, Probe
from starpod.check.requirement import NotShown, expect, must
from starpod.v1 import environment_pb2 as pb

TRIED = 8
"""Seeds tried, because the one action that a test needs may end the task."""


@must("C-58", "If one turn meets several limits, END_REASON_MAX_ACTIONS is told before END_REASON_MAX_TURNS.")
async def order(probe: Probe) -> None:
    limits = pb.LimitOverrides(max_turns=1, max_actions_per_turn=0, max_actions=1)
    for seed in range(TRIED):
        reply = await probe.open(want=probe.acting_want(), limits=limits, seed=seed)
        handle = Handle(probe.link, reply.sessions[0])
        transition = await handle.step([probe.choices(handle.session.observation)[0]])
        if transition.end_reason not in (pb.END_REASON_TERMINAL, pb.END_REASON_ENVIRONMENT_LIMIT):
            told = pb.EndReason.Name(transition.end_reason)
            mend = "look at the actions before the turns"
            expect(told == "END_REASON_MAX_ACTIONS", "END_REASON_MAX_ACTIONS where both limits are met", told, mend)
            return
    raise NotShown("one action ends the episode")


@must("C-59", "An episode that a limit cut short is not a success.")
async def cut_short(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=1))
    transition = await handle.step()
    expect(not transition.success, "success false or absent after MAX_TURNS", "true", "a limit solves no task")
