"""What confines a process that runs untrusted code."""
