"""Client of environment servers. A Fleet opens sessions, steps them, and recovers them if a server is lost."""

import os
import sys

if "grpc" not in sys.modules:
    # gRPC reads this once, when it is imported. By default it restarts its threads in a forked process, and 4 of 30
    # such processes crashed with SIGSEGV.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from starpod.client.errors import (
    BadArgument,
    DeadlineExceeded,
    Draining,
    EnvironmentBug,
    EpisodeOver,
    IncompatibleSnapshot,
    KeyReused,
    OutOfOrder,
    Overloaded,
    ReplayDiverged,
    ServerBug,
    SessionLost,
    StarpodError,
    TooLarge,
    Unauthenticated,
    UnknownEnvironment,
    UnknownSession,
    UnknownVersion,
    Unreachable,
    Unsupported,
)
from starpod.client.fleet import Fleet
from starpod.client.observation import Limits, Observation, Outcome, Transition, Want
from starpod.client.path import EpisodePath, Opening, PathTurn, Reseeding
from starpod.client.session import Session
from starpod.client.snapshot import Snapshot
from starpod.client.sync import SyncFleet, SyncSession
from starpod.client.transport import TLS
from starpod.v1.values import JSON, Action, EndReason, Image, Part, ToolCall

__all__ = [
    "JSON",
    "TLS",
    "Action",
    "BadArgument",
    "DeadlineExceeded",
    "Draining",
    "EndReason",
    "EnvironmentBug",
    "EpisodeOver",
    "EpisodePath",
    "Fleet",
    "Image",
    "IncompatibleSnapshot",
    "KeyReused",
    "Limits",
    "Observation",
    "Opening",
    "OutOfOrder",
    "Outcome",
    "Overloaded",
    "Part",
    "PathTurn",
    "ReplayDiverged",
    "Reseeding",
    "ServerBug",
    "Session",
    "SessionLost",
    "Snapshot",
    "StarpodError",
    "SyncFleet",
    "SyncSession",
    "TooLarge",
    "ToolCall",
    "Transition",
    "Unauthenticated",
    "UnknownEnvironment",
    "UnknownSession",
    "UnknownVersion",
    "Unreachable",
    "Unsupported",
    "Want",
]
