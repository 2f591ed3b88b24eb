"""Sessions that outlive their servers: the state of a session, and the retry, rebuild and checkpoint of its calls."""
