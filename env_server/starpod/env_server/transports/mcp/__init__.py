"""Environments as MCP servers: the action space as tools, with the tools reset, observe, fork and close."""
