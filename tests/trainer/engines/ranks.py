"""Two ranks that train one sharded model and sample from one server."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.trainer.engines.conformance import changed, logprobs_under, make_policy
from tests.trainer.engines.ranks_worker import BUCKET, COMMAND, SEEDS

ROOT = Path(__file__).resolve().parents[3]


async def check_two_ranks(url: str, folder: Path) -> None:
    """Each rank gets replies of the weights that both hold; nobody held more of them than was to be."""
    shared, out = folder / "shared", folder / "results.json"
    shared.mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *COMMAND, url, str(shared), str(out), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert await asyncio.wait_for(process.wait(), 240) == 0
    ranks = json.loads(out.read_text())
    assert len(ranks) == 2
    policy = make_policy(head=32)
    models = [changed(policy, seed) for seed in SEEDS]
    for rank, result in enumerate(ranks):
        assert [versions for *_, versions in result["replies"]] == [[1] * 8] * 2 + [[2] * 8] * 2
        for prompt, tokens, logprobs, versions in result["replies"]:
            expected = logprobs_under(models[versions[0] - 1], prompt, tokens, 1.0)
            assert logprobs == pytest.approx(expected, abs=1e-3)
        # The first rank fills a file at a time, and the others keep nothing.
        assert result["most"] <= result["largest"] + (BUCKET if rank == 0 else 0), result
    total = sum(parameter.nbytes for parameter in models[0].parameters())
    assert max(result["most"] for result in ranks) < total / 2
    assert ranks[0]["replies"][1] == ranks[1]["replies"][1]
    assert not list(shared.iterdir())
