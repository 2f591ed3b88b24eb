"""The `starpod` command, and its subcommands that list, describe and play environments."""
