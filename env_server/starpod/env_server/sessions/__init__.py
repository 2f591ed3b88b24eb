"""Sessions: the contract's calls, and the limits on sessions and requests."""
