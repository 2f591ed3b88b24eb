"""Stores: shops on disk, with their building and opening."""
