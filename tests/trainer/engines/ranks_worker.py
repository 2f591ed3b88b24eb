"""A rank of torchrun that shares a vLLM server with others: it hands over weights and samples."""

import asyncio
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.engines import weights
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.parallel.sharding import whole
from tests.trainer.engines.conformance import MAX_CONTEXT, ask, changed, hand_over, make_policy

BUCKET = 20_000
"""Bytes of a file of weights, instead of gibibytes."""
SEEDS = (7, 8)
"""Of the weights of each version."""
COMMAND = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Gathered:
    """Counts the bytes of whole tensors that are alive at a time."""

    def __init__(self) -> None:
        self.now = self.most = self.largest = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        out = whole(tensor)
        size = out.nbytes
        self.now += size
        self.most, self.largest = max(self.most, self.now), max(self.largest, size)
        weakref.finalize(out, self._freed, size)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


async def play(parallel: Parallel, url: str, folder: str) -> dict[str, Any]:
    gathered = Gathered()
    weights.whole, weights.SHARD_BYTES = gathered, BUCKET  # type: ignore[assignment]
    policy = make_policy(head=32)
    models = [changed(policy, seed) for seed in SEEDS]
    for model in models:
        sharding.shard(model, parallel.world, parallel.device)
    config = EngineConfig(name="vllm_remote", urls=(url,), slots=16, handover_folder=folder)
    engine = build_engine(config, policy, max_context=MAX_CONTEXT, parallel=parallel)
    replies = []
    for version, model in enumerate(models, start=1):
        await hand_over(engine, version, model)
        prompts = [[5, 9, parallel.rank], [11, version]]
        for prompt in prompts:
            reply = await engine.generate(ask(prompt))
            replies.append([prompt, reply.tokens, reply.logprobs, reply.versions])
        parallel.barrier()
    await engine.close()
    return {"replies": replies, "most": gathered.most, "largest": gathered.largest}


def main(url: str, folder: str, out: Path) -> None:
    torch.set_num_threads(1)
    parallel = Parallel.start("cpu")
    results = parallel.gather_objects(asyncio.run(play(parallel, url, folder)))
    if parallel.is_main:
        out.write_text(json.dumps(results))
    parallel.close()
    parallel.end(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
