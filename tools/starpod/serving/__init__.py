"""What programs share that serve or run others' code: sockets, HTTP servers, locked folders, Ctrl-C and forks."""
