"""The contract as JSON over HTTP: the same calls, admission and limits as gRPC's, in the same event loop."""
