"""Checkers of answers. Each is a model of its settings, and is found by its name."""
