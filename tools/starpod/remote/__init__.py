"""What commands and pages share that reach a server: options, connections, look-up, readable errors, and a game."""
