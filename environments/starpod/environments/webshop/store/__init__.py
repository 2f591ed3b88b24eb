"""A built shop on disk: how it is built, kept and opened."""
