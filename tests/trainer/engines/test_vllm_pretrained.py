"""A pretrained model, SmolLM2, on a real vLLM server: what an engine does depends on no model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.trainer.models.bundled import source_of
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import ModelConformance, make_pretrained_policy
from tests.trainer.engines.real_vllm import Served, Server, serving

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_pretrained_policy()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Path(source_of("smollm2"))) as server:
        yield server


class TestServed(Served, ModelConformance):
    scale = 0.02
