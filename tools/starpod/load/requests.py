"""The messages that a plan's sessions send, apart from steps."""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2

from starpod.load.link import Player
from starpod.load.plan import Plan
from starpod.v1 import environment_pb2 as pb


class Requests:
    """Builds requests: messages of the contract, or for an OpenEnv server what its `reset` takes.

    sees: the policy looks at observations.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._openenv = plan.wire == "openenv"
        shown = not self._openenv and plan.turns.kind != "recorded"
        self._want = pb.Want(
            valid_actions=shown and not plan.turns.actions, expert_action=shown and plan.turns.kind == "expert"
        )
        self.sees = bool(self._want.ListFields())
        self._options: struct_pb2.Struct | None = None
        if plan.options:
            self._options = struct_pb2.Struct()
            self._options.update(dict(plan.options))

    def open(self, seed: int, dynamics_seed: int | None) -> Any:
        if self._openenv:
            return {"seed": seed}
        return pb.OpenRequest(
            environment_id=self._plan.environment_id,
            version=self._plan.version,
            options=self._options,
            seed=seed,
            dynamics_seed=dynamics_seed,
            want=self._want if self.sees else None,
        )

    def reset(self, player: Player, seed: int, dynamics_seed: int | None) -> Any:
        if self._openenv:
            return {"seed": seed}
        return pb.ResetRequest(session_id=player.session_id, epoch=player.epoch, seed=seed, dynamics_seed=dynamics_seed)

    def close(self, *session_ids: str) -> Any:
        """None for an OpenEnv server: there one hangs up."""
        return None if self._openenv else pb.CloseRequest(session_ids=session_ids)

    def extra(self, call: str, player: Player) -> Any:
        """Of one of plan.EXTRAS."""
        match call:
            case "render":
                return pb.RenderRequest(session_id=player.session_id)
            case "fork":
                return pb.ForkRequest(session_id=player.session_id, epoch=player.epoch, step_index=player.index)
            case "snapshot":
                return pb.SnapshotRequest(session_id=player.session_id)
        return pb.RenewRequest(session_ids=[player.session_id])
