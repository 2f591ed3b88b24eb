"""The default engine does what every engine has to do. (vLLM's have files of their own.)"""

from collections.abc import AsyncIterator

import pytest

from starpod.trainer.engines.base import Engine
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import (
    MAX_CONTEXT,
    EngineConformance,
    ModelConformance,
    make_policy,
    make_pretrained_policy,
)

# Query heads that share keys, and embeddings that are the output layer too.
SHAPES = {1: {"tied": True}, 3: {"key_value_heads": 1}, 16: {}}


class TestTorchEngine(EngineConformance):
    @pytest.fixture(params=SHAPES, ids=lambda slots: f"{slots} slots")
    def slots(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    @pytest.fixture
    def policy(self, slots: int) -> Policy:
        return make_policy(**SHAPES[slots])

    @pytest.fixture
    async def engine(self, slots: int, policy: Policy) -> AsyncIterator[Engine]:
        engine = build_engine(EngineConfig(slots=slots), policy, max_context=MAX_CONTEXT)
        yield engine
        await engine.close()


@pytest.mark.smollm
class TestTorchEngineWithAPretrainedModel(ModelConformance):
    scale = 0.02

    @pytest.fixture(scope="class")
    def policy(self) -> Policy:
        return make_pretrained_policy()

    @pytest.fixture
    async def engine(self, policy: Policy) -> AsyncIterator[Engine]:
        engine = build_engine(EngineConfig(slots=16), policy, max_context=MAX_CONTEXT)
        yield engine
        await engine.close()
