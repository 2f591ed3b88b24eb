"""The running server: its options, workers, logs and memory."""
