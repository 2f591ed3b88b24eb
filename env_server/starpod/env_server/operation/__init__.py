"""Configuration, quotas of tenants, metrics and traces: modules for operators."""
