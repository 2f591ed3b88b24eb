"""`starpod check`: tests whether a server in any language keeps the contract of docs/protocol.md.

Each requirement has one small test, which uses the server only over the network.
"""
