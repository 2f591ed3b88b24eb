"""Adapters for other trainers, one module for each trainer. See docs/adapters.md."""
