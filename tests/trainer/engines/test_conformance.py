"""The default engine does what every engine has to do. (vLLM's have files of their own.)"""

from collections.abc import AsyncIterator

import pytest

from starpod.trainer.engines.base import Engine
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import MAX_CONTEXT, EngineConformance, make_pretrained_policy


class TestTorchEngine(EngineConformance):
    @pytest.fixture(params=[1, 3, 16], ids=lambda slots: f"{slots} slots")
    async def engine(self, request: pytest.FixtureRequest, policy: Policy) -> AsyncIterator[Engine]:
        engine = build_engine(EngineConfig(slots=request.param), policy, max_context=MAX_CONTEXT)
        yield engine
        await engine.close()


@pytest.fixture(scope="module")
def pretrained() -> Policy:
    return make_pretrained_policy()


@pytest.mark.smollm
class TestTorchEngineWithAPretrainedModel(EngineConformance):
    scale = 0.02

    @pytest.fixture
    def policy(self, pretrained: Policy) -> Policy:
        return pretrained

    @pytest.fixture
    async def engine(self, policy: Policy) -> AsyncIterator[Engine]:
        engine = build_engine(EngineConfig(slots=16), policy, max_context=MAX_CONTEXT)
        yield engine
        await engine.close()
