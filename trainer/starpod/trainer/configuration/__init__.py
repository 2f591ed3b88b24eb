"""The configuration of a run: its sections, how it is read, and what is refused before a run starts."""
