"""`starpod load`: generate the load of many agents on a server and report throughput and latencies (docs/load.md)."""
