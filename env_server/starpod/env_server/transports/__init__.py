"""Ways in: gRPC, JSON over HTTP, MCP and ORS, each a mapping onto one service."""
