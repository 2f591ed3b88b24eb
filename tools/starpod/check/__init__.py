"""`starpod check`: does a server, in any language, keep the contract? One small test for each requirement of
docs/protocol.md, against the wire alone."""
