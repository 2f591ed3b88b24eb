"""Measurement of how easily the project's texts are understood."""
