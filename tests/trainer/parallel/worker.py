"""What each rank of test_parallel.py runs, and what it is compared with in one process."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, load_checkpoint
from starpod.trainer.checkpoints.state import flatten_optimizer, split_parts, unflatten_optimizer
from starpod.trainer.checkpoints.tensors import TensorFile
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.engines.weights import weights_of
from starpod.trainer.learner import Learner
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy, Scores, build_policy
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.parallel.sharding import whole
from starpod.trainer.update import PolicyTrainer
from tests.trainer.tiny_learner import VERSION, group_of

STEPS = 4
HALF = 2


def make_policy() -> Policy:
    """Tied embeddings, a shared critic, logits in slices, and sizes that are no multiples of the number of ranks."""
    shape = TinyConfig(hidden=10, heads=1, key_value_heads=1, intermediate=21, vocabulary=335, tied=True)
    return build_policy(
        ModelConfig(tiny=shape, logits_at_once=1000), texts=["Left || Right", "a hole"], critic="shared", seed=0
    )


def blocks_of(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Three micro-batches of rows with very different numbers of tokens: ids, lengths, and what counts as sampled."""
    generator = torch.Generator().manual_seed(step)
    blocks = []
    for rows, longest in ((1, 4), (4, 16), (2, 9)):
        tokens_BL = torch.randint(0, 256, (rows, longest), generator=generator)
        lengths_B = torch.randint(2, longest + 1, (rows,), generator=generator)
        places = torch.arange(longest)[None]
        blocks.append((tokens_BL, lengths_B, (places > 0) & (places < lengths_B[:, None])))
    return blocks


def gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole copies of tensors that may be sharded or the model's own memory."""
    return {name: whole(tensor).clone() for name, tensor in state.items()}


def train(parallel: Parallel, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """Four steps, or the last two of them, with a checkpoint after the second. What can be compared, on rank 0."""
    model = make_policy()
    sharding.shard(model, parallel.world, parallel.device)
    optimizer = torch.optim.AdamW(
        [{"params": model.model.parameters(), "lr": 0.02}, {"params": model.critic_parameters(), "lr": 0.1}],
        weight_decay=0.01,
    )
    checkpoints = Checkpoints(folder, parallel=parallel.apart())
    first = 0
    if resume is not None:
        loaded = load_checkpoint(resume)
        first = loaded.step
        sharding.load_full_state_dict(model, loaded.tensors["model"])
        state = unflatten_optimizer(loaded.tensors["optimizer"], loaded.state["optimizer"])
        sharding.load_optimizer_state(model, optimizer, state)
    losses, norms, critic_norms = [], [], []
    for step in range(first, STEPS):
        blocks = blocks_of(step)
        count = sum(int(sampled_BL.sum()) for _, _, sampled_BL in blocks)
        with torch.no_grad():  # as the scoring before an update: nothing of it may linger
            for block, _ in parallel.share(blocks):
                model.score(*block)
        optimizer.zero_grad()
        total = torch.zeros(())
        for block, mine in parallel.share(blocks):
            scores: Scores = model.score(*block, entropy=True, values=True)
            assert scores.values_N is not None
            loss = ((scores.values_N - 1).square() - scores.logprobs_N).sum() / count * mine
            loss.backward()
            total += loss.detach()
        norms.append(float(sharding.clip_grad_norm(model.trained_parameters(), 1.0)))
        critic_norms.append(float(sharding.clip_grad_norm(model.critic_parameters(), 1.0)))
        optimizer.step()
        losses.append(float(parallel.sum(total)))
        if step + 1 == HALF:
            tensors, values = flatten_optimizer(sharding.optimizer_state(model, optimizer))
            weights = sharding.state_dict(model)
            checkpoints.save(step + 1, {"model": weights, "optimizer": tensors}, {"optimizer": values})
    replica = make_policy()
    sharding.copy_weights(model, replica)
    weights = gathered(sharding.state_dict(model))
    assert all(torch.equal(replica.state_dict()[name], tensor) for name, tensor in weights.items())
    return {
        "losses": losses,
        "norms": norms,
        "critic_norms": critic_norms,
        "weights": {name: value.tolist() for name, value in weights.items()},
    }


def adapt(parallel: Parallel, base: Path, dtype: str) -> dict[str, Any]:
    """Two updates of adapters with a KL term. What a checkpoint would hold, and what an engine would be handed."""
    values = {"name": str(base), "lora": {"rank": 2}, "dtype": dtype, "base_dtype": dtype}
    policy = build_policy(ModelConfig.model_validate(values), texts=None, critic="shared", seed=0)
    groups = [group_of(policy, number, (1.0, 0.0, 0.5)) for number in range(2)]
    sharding.shard(policy, parallel.world, parallel.device)
    algorithm = AlgorithmConfig.model_validate({"preset": "starpo-ppo", "kl": {"where": "loss", "coefficient": 0.1}})
    # Epsilon keeps Adam from making steps of rounding errors.
    optimizer = OptimizerConfig(lr=1.0, critic_lr=1.0, eps=1.0)
    learner = Learner({"": PolicyTrainer(policy, algorithm, optimizer, parallel, max_length=64)})
    learner.learn(groups, version=VERSION - 1)
    learner.freeze_reference(None)
    metrics = learner.learn(groups, version=VERSION - 1)
    state, reference = gathered(learner.policy_state()), gathered(learner.reference_state())
    tensors, _ = learner.state()
    learner.learn(groups, version=VERSION - 1)
    learner.load_policy(state)
    learner.freeze_reference(reference)
    again = gathered(learner.reference_state())
    assert again.keys() == reference.keys()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in again.items())
    norms = learner.gradients(groups, version=VERSION - 1, buckets=1)
    handed = {name: weight.float().tolist() for name, weight in weights_of(policy.model)}
    weights = {name: tensor.tolist() for name, tensor in state.items()}
    return {
        "norm": metrics["update/grad_norm"],
        "gradients": [norms[f"gradients/1/{component}"] for component in ("task", "entropy", "kl")],
        "weights": weights,
        "handed": handed,
        "moments": len(tensors),
    }


def team(parallel: Parallel) -> dict[str, Any]:
    """Two updates of two policies. Metrics of the second one, norms of gradients, what a checkpoint would hold."""
    first = make_policy()
    first.critic, first.critic_kind = None, "none"
    groups = [group_of(first, number, (1.0, 0.0, 0.5)) for number in (1, 3)]
    for turn in (turn for group in groups for episode in group.episodes for turn in episode.turns[1:]):
        turn.agent_id, turn.parts = "verifier", {"environment": 0.1 * turn.reply[0]}
    for turn in (turn for group in groups for episode in group.episodes for turn in episode.turns[:1]):
        turn.agent_id, turn.parts = "solver", {"environment": 0.2 * turn.reply[0]}
    policy = Policies.of(("solver", "verifier"), first)
    algorithm = AlgorithmConfig.model_validate({"preset": "dapo", "advantage": "dr_mas"})
    trainers = {}
    for agent, own in policy.by_agent.items():
        sharding.shard(own, parallel.world, parallel.device)
        trainers[agent] = PolicyTrainer(own, algorithm, OptimizerConfig(lr=1.0, eps=1.0), parallel, max_length=64)
    learner = Learner(trainers)
    learner.learn(groups, version=VERSION - 1)
    metrics = learner.learn(groups, version=VERSION - 1)
    metrics |= learner.gradients(groups, version=VERSION - 1, buckets=1)
    replica = Policies.of(tuple(policy.by_agent), make_policy())
    sharding.copy_weights(policy.model, replica.model)
    state = gathered(learner.policy_state())
    assert all(
        torch.equal(tensor, split_parts(state)[agent][name])
        for agent, own in replica.by_agent.items()
        for name, tensor in own.state_dict().items()
        if not name.startswith("critic")
    )
    return {"metrics": metrics, "weights": {name: tensor.tolist() for name, tensor in state.items()}}


def save_on_a_full_disk(parallel: Parallel, folder: Path) -> str:
    """What this rank is told if the second one cannot write its part of a checkpoint."""

    def fail(*_: object) -> None:
        raise OSError("no space left")

    if parallel.rank == 1:
        TensorFile.write_parts = fail  # type: ignore[method-assign]
    try:
        Checkpoints(folder, parallel=parallel.apart()).save(HALF + 1, {"model": {"w": torch.ones(2)}}, {})
    except CheckpointError as error:
        return str(error)
    return "saved"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    parallel = Parallel.start("cpu")
    rank, world = parallel.rank, parallel.world
    assert world == 2
    assert parallel.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert parallel.broadcast_object(f"from {rank}") == "from 0"
    assert parallel.sum(torch.tensor([rank + 1.0])).tolist() == [3.0]
    assert parallel.any(rank == 1)
    assert not parallel.any(False)
    assert sum(map(len, parallel.gather_objects(parallel.split(range(7))))) == 7
    parallel.barrier()
    results = {
        "whole": train(parallel, folder / "two"),
        "resumed": train(parallel, folder / "unused", folder / "one" / "step-00000002"),
    }
    for dtype in ("float32", "bfloat16"):
        results[dtype] = adapt(parallel, folder / "base", dtype)
    results["team"] = team(parallel)
    results["full"] = parallel.gather_objects(save_on_a_full_disk(parallel, folder / "two"))
    if parallel.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    parallel.close()
    parallel.end(0)
