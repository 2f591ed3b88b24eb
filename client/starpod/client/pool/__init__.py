"""The servers of a fleet: who belongs to it, their health and leases, and which of them takes the next session."""
