"""Benchmarks, run by `make bench`. All clients and servers of a comparison use gRPC's core in the same way."""

import signal
import sys

from starpod.cli.polling import prefer_poller

prefer_poller()

if sys.argv[0] == "-m":  # Python's value while it looks for the module of `python -m benchmarks...`
    for _number in (signal.SIGTERM, signal.SIGHUP):
        # Otherwise the signal would end the benchmark at once, and its servers would live on.
        signal.signal(_number, lambda number, _: sys.exit(128 + number))
