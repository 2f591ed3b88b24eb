"""Stepping environments over the wire: sessions, the fleet of servers that holds them, and their recovery."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from starpod.client.observation import (
        JSON,
        Action,
        EndReason,
        Image,
        Limits,
        Observation,
        Outcome,
        Part,
        ToolCall,
        Transition,
        Want,
    )
    from starpod.client.session import Session
    from starpod.client.snapshot import Snapshot
    from starpod.client.sync import SyncFleet, SyncSession
    from starpod.client.transport import TLS

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
    "Fleet",
    "Image",
    "IncompatibleSnapshot",
    "KeyReused",
    "Limits",
    "Observation",
    "OutOfOrder",
    "Outcome",
    "Overloaded",
    "Part",
    "ReplayDiverged",
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

_MODULES = ("errors", "fleet", "observation", "session", "snapshot", "sync", "transport")


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: programs call `polling.prefer_poller` before gRPC is loaded.
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"starpod.client.{module}")).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
