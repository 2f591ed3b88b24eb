"""Benchmarks, run by `make bench`. All clients and servers of a comparison use gRPC's core in the same way."""

from starpod.cli.polling import prefer_poller

prefer_poller()
