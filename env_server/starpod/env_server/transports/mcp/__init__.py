"""Environments as MCP servers: the action space as tools, beside reset, observe, fork and close."""
