"""Training in several processes that torchrun starts."""
