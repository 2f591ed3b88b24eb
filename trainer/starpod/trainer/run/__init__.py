"""A training run: what the loop calls (run.py), and the objects that it is made of."""
