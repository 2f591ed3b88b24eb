"""The number of sessions that a server holds."""

from __future__ import annotations

from starpod.client.adapters.text import Setting


def live_sessions(setting: Setting) -> int:
    """Return the number of sessions that all servers of a setting hold now."""
    fleet = setting.shared_fleet()
    fleet.describe()
    return sum(replica.description.live_sessions for replica in fleet.fleet.replicas if replica.description)
