"""The shop as a web site. It is a client of the gRPC service, so people and agents can use the same sessions."""
