"""The serialised state of a session."""

from __future__ import annotations

from dataclasses import dataclass

from starpod.v1 import environment_pb2 as pb


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole state of a session. `Fleet.restore` continues from it on any server with a compatible version."""

    environment_id: str
    """Id of the environment, for example sokoban-v1."""
    environment_version: str
    """Version that wrote the state, for example 1.0.0."""
    state: bytes
    """Serialised state, opaque to the client."""
    digest: bytes
    """SHA-256 of environment_id, NUL, environment_version, NUL, state."""

    @classmethod
    def from_proto(cls, snapshot: pb.SessionSnapshot) -> Snapshot:
        """Convert from a message."""
        return cls(snapshot.environment_id, snapshot.environment_version, snapshot.state, snapshot.digest)

    def to_proto(self) -> pb.SessionSnapshot:
        """Convert to a message."""
        return pb.SessionSnapshot(
            environment_id=self.environment_id,
            environment_version=self.environment_version,
            state=self.state,
            digest=self.digest,
        )

    def to_bytes(self) -> bytes:
        """Serialise the snapshot, for example for a file. `from_bytes` reads it."""
        return self.to_proto().SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """Read what `to_bytes` wrote. Raises google.protobuf.message.DecodeError for other bytes."""
        return cls.from_proto(pb.SessionSnapshot.FromString(data))
