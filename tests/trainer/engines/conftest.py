"""The policy that engines sample from, unless a module has another one."""

import pytest

from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import make_policy


@pytest.fixture
def policy() -> Policy:
    return make_policy()
