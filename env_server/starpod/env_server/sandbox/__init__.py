"""Confinement of processes that run untrusted code."""
