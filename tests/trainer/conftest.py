"""Fixtures that all tests of the trainer share."""

from collections.abc import AsyncIterator

import pytest
import torch

from starpod.client import Fleet
from tests.support import ServerProcess

# Kernels of tiny models are faster on one thread, and several test processes share the cores.
torch.set_num_threads(1)


@pytest.fixture
async def fleet(server: ServerProcess) -> AsyncIterator[Fleet]:
    """A fleet of the one server with every built-in environment."""
    async with Fleet(server.address) as fleet:
        yield fleet
