"""The contract as JSON over HTTP, with the same calls, admission and limits as gRPC, in the same event loop."""
