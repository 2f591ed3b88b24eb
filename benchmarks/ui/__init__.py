"""The live site."""
