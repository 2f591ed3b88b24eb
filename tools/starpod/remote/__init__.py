"""What commands that reach a server share: options, connections, look-up of environments and readable errors."""
