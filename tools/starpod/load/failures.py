"""Which class an error belongs to. Errors are counted by class and never mixed with latencies."""

from __future__ import annotations

from starpod.client.errors import StarpodError

_CLASSES = {
    "BAD_ARGUMENT": "bad_argument",
    "UNKNOWN_ENVIRONMENT": "bad_argument",
    "UNKNOWN_VERSION": "bad_argument",
    "OUT_OF_ORDER": "bad_argument",
    "EPISODE_OVER": "bad_argument",
    "KEY_REUSED": "bad_argument",
    "INCOMPATIBLE_SNAPSHOT": "bad_argument",
    "UNSUPPORTED": "bad_argument",
    "TOO_LARGE": "bad_argument",
    "ENVIRONMENT_BUG": "environment_bug",
    "OVERLOADED": "overload",
    "UNKNOWN_SESSION": "lost_session",
    "SESSION_LOST": "lost_session",
    "DEADLINE": "deadline",
    "SERVER_BUG": "server_bug",
    "DRAINING": "refused",
    "UNAUTHENTICATED": "refused",
}


def error_class(error: StarpodError) -> str:
    """One of thresholds.CLASSES: by the protocol's reason; without one it came from the transport."""
    return _CLASSES.get(error.reason, "transport")
