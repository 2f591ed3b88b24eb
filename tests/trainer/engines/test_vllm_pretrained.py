"""A pretrained model, SmolLM2, through the real vLLM in process and served: all that an engine has to do."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from starpod.trainer.models.bundled import bundled_folder
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import EngineConformance, Reset, make_pretrained_policy
from tests.trainer.engines.real_vllm import InProcess, Served, Server, build, serving

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def shared_policy() -> Policy:
    return make_pretrained_policy()


@pytest.fixture(scope="module")
def core_reset(shared_policy: Policy) -> Reset:
    return Reset(shared_policy)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(shared_policy: Policy) -> AsyncIterator[Any]:
    engine = build(shared_policy)
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def server_reset(shared_policy: Policy) -> Reset:
    return Reset(shared_policy)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(bundled_folder()) as server:
        yield server


class TestInProcess(InProcess, EngineConformance):
    scale = 0.02


class TestServed(Served, EngineConformance):
    scale = 0.02
