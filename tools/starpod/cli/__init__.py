"""The `starpod` command: its subcommands, and those that list, describe and play environments."""
