"""The objects that make up a training run. The loop drives the `Run` in run.py."""
