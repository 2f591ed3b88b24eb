"""The servers of a fleet: membership, health, leases, and placement of sessions."""
