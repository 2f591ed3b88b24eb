"""The shop as a web site: a client of the gRPC service, so that people and agents use the same sessions."""
