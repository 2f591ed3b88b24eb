"""A real vLLM server as the teacher of on-policy distillation."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from starpod.trainer.algorithms.distillation import VllmTeacher
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.sample import Sample
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.run.teachers import ServedJudge
from tests.trainer.engines.conformance import assert_keeps_structure, make_policy
from tests.trainer.engines.real_vllm import Server, remote, serving
from tests.trainer.models.tiny_policy import tiny_policy


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_its_log_probabilities_are_those_of_the_model_here(tmp_path: Path) -> None:
    policy = make_policy(head=32)
    policy.save(tmp_path / "model")
    batch = Batch.from_samples([Sample.of([5, 9, 70], [12, 30, 4]), Sample.of([1], [2])])
    (indices,) = batch.micro_batches(range(2), 10**6)
    block = batch.block(indices)
    with torch.no_grad():
        here_BT = block.in_rows(policy.score(*block.inputs).logprobs_N)
    with serving(tmp_path / "model", "--no-skip-tokenizer-init") as server:
        settings = VllmTeacher(url=server.url)
        judge = ServedJudge(settings, policy.tokenizer, Parallel())
        there_BT = judge.logprobs(cast(Any, None), batch, cast(Any, None), batch.mask_BT)
        torch.testing.assert_close(there_BT, here_BT, atol=1e-3, rtol=0)
        with pytest.raises(ConfigError, match="different ids"):
            ServedJudge(settings, tiny_policy().tokenizer, Parallel())
        asyncio.run(_assert_serves_structures(server, policy))


async def _assert_serves_structures(server: Server, policy: Policy) -> None:
    """Check the engine that samples from this server, which has a tokenizer. Starting another takes half a minute."""
    engine = remote(server, policy=policy)
    try:
        await assert_keeps_structure(engine, policy)
    finally:
        await engine.close()
