"""Rewards that read the boards of Frozen Lake and Sokoban. The trainer finds them by entry point."""
