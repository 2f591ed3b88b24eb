"""Benchmarks of the live site."""
