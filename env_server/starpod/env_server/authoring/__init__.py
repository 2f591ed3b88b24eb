"""What authors of environments use: the base class, chat models, pictures, and reading of untrusted texts."""
