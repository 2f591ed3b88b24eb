"""Questions and answers of a file as an environment."""
