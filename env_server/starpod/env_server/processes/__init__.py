"""Where episodes run: threads, processes of their own, and the workers of a server."""
