"""Options, connections, look-up, readable errors and a game, for commands and pages that reach a server."""
