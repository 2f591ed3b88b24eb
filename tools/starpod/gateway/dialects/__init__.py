"""The APIs that clients speak: each reads a request and writes a reply, whole or as events, in its own spelling."""
