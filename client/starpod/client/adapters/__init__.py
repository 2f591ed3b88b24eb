"""Starpod's environments in other trainers, one file for each; docs/adapters.md shows how. Import the file you need."""
