"""Recovery of sessions: their state, and the retries, rebuilds and checkpoints that let them outlive a server."""
