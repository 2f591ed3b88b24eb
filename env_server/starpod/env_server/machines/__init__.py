"""Containers as machines of sessions: the engine, a machine with its shells, and the pool of warm ones."""
