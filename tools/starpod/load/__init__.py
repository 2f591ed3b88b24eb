"""`starpod load`: drives a server as many agents would, and says what it held and what it cost (docs/load.md)."""
