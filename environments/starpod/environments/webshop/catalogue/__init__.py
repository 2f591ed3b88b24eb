"""Products, their prices and the goals made of them: read from the original's files, or synthetic."""
