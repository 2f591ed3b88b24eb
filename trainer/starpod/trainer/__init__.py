"""Training multi-turn agents with StarPO on environments that are served elsewhere."""
