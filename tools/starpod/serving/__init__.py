"""Sockets, HTTP servers, locked folders, and checks for Ctrl-C and forks, which all programs that serve share."""
