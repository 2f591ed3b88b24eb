"""Transports: gRPC, JSON over HTTP, MCP and ORS, each mapped to one service."""
