"""The APIs that clients speak. Each dialect parses requests and formats replies, whole or as events."""
