"""What an operator sets and sees: configuration, quotas of tenants, metrics and traces."""
