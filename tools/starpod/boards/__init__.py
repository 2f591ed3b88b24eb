"""Rewards that read the boards of Frozen Lake and Sokoban, which the trainer finds by entry point."""
