"""Environments as MCP servers: the action space as tools, and the tools reset, observe, fork and close."""
