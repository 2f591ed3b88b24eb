"""Products, prices and goals, from the original's files or synthetic."""
