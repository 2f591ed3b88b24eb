"""Hosting of other packages' environments."""
