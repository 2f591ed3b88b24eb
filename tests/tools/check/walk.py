"""The toy environment of the reference server, and what Describe says of it."""

import hashlib
import json
from dataclasses import dataclass

from starpod.v1 import environment_pb2 as pb

NAMES = ("left", "right", "wait")
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "length": {"type": "integer", "minimum": 3, "maximum": 99, "default": 9},
        "slip": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.3},
    },
}
SPEC = pb.EnvironmentSpec(
    id="walk-v1",
    version="1.2.0",
    title="A walk on slippery ground",
    action_space=pb.ActionSpace(names=NAMES),
    options_schema_json=json.dumps(SCHEMA),
    render_modes=["text", "html"],
    limits=pb.Limits(max_turns=40, max_actions_per_turn=4),
    capabilities=pb.EnvironmentCapabilities(
        fork=True, snapshot=True, deterministic=True, expert_action=True, score=True, valid_actions=True, state_key=True
    ),
    concurrency=pb.CONCURRENCY_CLASS_INLINE,
)


def mix(*values: object) -> int:
    """64 bits that depend on all values."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, values)).encode()).digest()[:8], "big")


@dataclass
class Walk:
    """Reach the last of `length` cells; on slippery ground a move may go the other way. Luck counts its own draws."""

    length: int
    slip: float
    position: int = 0
    luck: int = 0
    draws: int = 0

    def step(self, name: str) -> tuple[float, bool, bool]:
        """(reward, effective, solved)"""
        before = self.position
        if name != "wait":
            self.draws += 1
            slipped = mix("luck", self.luck, self.draws) / 2**64 < self.slip
            move = (1 if name == "right" else -1) * (-1 if slipped else 1)
            self.position = min(max(self.position + move, 0), self.length - 1)
        solved = self.position == self.length - 1
        return (1.0 if solved else -0.1), self.position != before, solved

    def picture(self) -> str:
        return "".join("@" if cell == self.position else "." for cell in range(self.length))
