"""Places where episodes run: threads, separate processes, and the workers of a server."""
