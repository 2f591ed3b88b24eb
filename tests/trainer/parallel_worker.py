"""What each rank of test_parallel.py runs, and what it is compared with in one process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from starpod.trainer.checkpoint import Checkpoints, load_checkpoint
from starpod.trainer.optimizer_state import flatten_optimizer, unflatten_optimizer
from starpod.trainer.parallel import Parallel

STEPS = 4
HALF = 2


@dataclass
class Scores:
    logprobs_N: Tensor
    values_N: Tensor


class Scorer(nn.Module):
    """A tiny language model with a value head that is run through `score`, as the trainer's policy is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=17,  # no multiple of the number of ranks
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
        self.model = Qwen2ForCausalLM(config)
        self.value_head = nn.Linear(12, 1)

    def score(self, tokens_BL: Tensor, mask_BL: Tensor) -> Scores:
        hidden_BLD = self.model.model(input_ids=tokens_BL, use_cache=False).last_hidden_state[:, :-1]
        logits_BLV = self.model.lm_head(hidden_BLD)
        logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, tokens_BL[:, 1:, None])[..., 0]
        mask_BL = mask_BL[:, 1:]
        return Scores(logprobs_BL[mask_BL], self.value_head(hidden_BLD)[..., 0][mask_BL])


def blocks_of(step: int) -> list[tuple[Tensor, Tensor]]:
    """Three micro-batches of rows with very different numbers of tokens."""
    generator = torch.Generator().manual_seed(step)
    blocks = []
    for rows, longest in ((1, 4), (4, 16), (2, 9)):
        tokens = torch.randint(1, 17, (rows, longest), generator=generator)
        lengths = torch.randint(2, longest + 1, (rows, 1), generator=generator)
        blocks.append((tokens, torch.arange(longest)[None] < lengths))
    return blocks


def train(parallel: Parallel, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """Four steps, or the last two of them, with a checkpoint after the second. What can be compared, on rank 0."""
    model = Scorer()
    parallel.shard(model)
    optimizer = torch.optim.AdamW(
        [{"params": model.model.parameters(), "lr": 0.02}, {"params": model.value_head.parameters(), "lr": 0.1}],
        weight_decay=0.01,
    )
    checkpoints = Checkpoints(folder)
    first = 0
    if resume is not None:
        loaded = load_checkpoint(resume)
        first = loaded.step
        parallel.load_full_state_dict(model, loaded.tensors["model"])
        state = unflatten_optimizer(loaded.tensors["optimizer"], loaded.state["optimizer"])
        parallel.load_optimizer_state(model, optimizer, state)
    losses, norms = [], []
    for step in range(first, STEPS):
        blocks = blocks_of(step)
        count = sum(int(mask_BL[:, 1:].sum()) for _, mask_BL in blocks)
        with torch.no_grad():  # as the scoring before an update: nothing of it may linger
            for (tokens_BL, mask_BL), _ in parallel.share(blocks):
                model.score(tokens_BL, mask_BL)
        optimizer.zero_grad()
        total = torch.zeros(())
        for (tokens_BL, mask_BL), mine in parallel.share(blocks):
            scores = model.score(tokens_BL, mask_BL)
            loss = ((scores.values_N - 1).square() - scores.logprobs_N).sum() / count * mine
            loss.backward()
            total += loss.detach()
        norms.append(float(parallel.clip_grad_norm(model, 1.0)))
        optimizer.step()
        losses.append(float(parallel.sum(total)))
        if step + 1 == HALF:
            weights = parallel.full_state_dict(model)
            tensors, values = flatten_optimizer(parallel.optimizer_state(model, optimizer))
            if parallel.is_main:
                checkpoints.save(step + 1, {"model": weights, "optimizer": tensors}, {"optimizer": values})
    replica = Scorer()
    parallel.copy_weights(model, replica)
    weights = parallel.full_state_dict(model)
    assert bool(weights) == parallel.is_main
    assert all(torch.equal(replica.state_dict()[name], tensor) for name, tensor in weights.items())
    return {"losses": losses, "norms": norms, "weights": {name: value.tolist() for name, value in weights.items()}}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    parallel = Parallel.start("cpu")
    rank, world = parallel.rank, parallel.world
    assert world == 2
    assert parallel.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert parallel.broadcast_object(f"from {rank}") == "from 0"
    assert parallel.sum(torch.tensor([rank + 1.0])).tolist() == [3.0]
    assert parallel.sum_floats({"a": 1.0, str(rank): 2.0}) == {"a": 2.0, "0": 2.0, "1": 2.0}
    assert parallel.any(rank == 1)
    assert not parallel.any(False)
    assert sum(map(len, parallel.gather_objects(parallel.split(range(7))))) == 7
    parallel.barrier()
    results = {
        "whole": train(parallel, folder / "two"),
        "resumed": train(parallel, folder / "unused", folder / "one" / "step-00000002"),
    }
    if parallel.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    parallel.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
