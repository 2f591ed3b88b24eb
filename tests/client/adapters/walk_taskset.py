"""A plugin of verifiers, as a user writes one."""

from starpod.client.adapters.verifiers import StarpodEnv, StarpodHarness, StarpodTaskset

__all__ = ["StarpodEnv", "StarpodHarness", "StarpodTaskset"]
