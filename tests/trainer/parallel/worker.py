"""The program of each rank of test_parallel.py, and its equivalent in one process."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, load_checkpoint
from starpod.trainer.checkpoints.state import split_parts
from starpod.trainer.checkpoints.tensors import TensorFile
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.engines.weights import weights_of
from starpod.trainer.learner import Learner
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.parallel.sharding import whole
from starpod.trainer.update import PolicyTrainer
from tests.trainer.tiny_learner import VERSION, group_of

STEPS, HALF = 4, 2


def make_policy() -> Policy:
    """Tied embeddings, a shared critic, logits in slices, and sizes that are no multiples of the number of ranks."""
    shape = TinyConfig(hidden=10, heads=1, key_value_heads=1, intermediate=21, vocabulary=335, tied=True)
    return build_policy(
        ModelConfig(tiny=shape, logits_at_once=1000), texts=["Left || Right", "a hole"], critic="shared", seed=0
    )


def make_trainer(policy: Policy, algorithm: Any, parallel: Parallel, micro_batch_tokens: int = 8192) -> PolicyTrainer:
    """A trainer of the policy, which is sharded."""
    sharding.shard(policy, parallel.world, parallel.device)
    # Epsilon keeps Adam from making steps of rounding errors.
    optimizer = OptimizerConfig(lr=1.0, critic_lr=1.0, eps=1.0, micro_batch_tokens=micro_batch_tokens)
    return PolicyTrainer(policy, AlgorithmConfig.model_validate(algorithm), optimizer, parallel, max_length=64)


def gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole copies of tensors that may be sharded or the model's own memory."""
    return {name: whole(tensor).clone() for name, tensor in state.items()}


def train(parallel: Parallel, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """Make four updates, or the last two of them, with a checkpoint after the second. Return metrics and weights."""
    # Five micro-batches of very different numbers of tokens: one rank makes a pass that does not count.
    groups = [group_of(make_policy(), number, (1.0, 0.0, 0.5), turns=1 + 3 * number) for number in range(2)]
    model = make_policy()
    trainer = make_trainer(model, {"preset": "starpo-s"}, parallel, micro_batch_tokens=24)
    learner = Learner({"": trainer})
    checkpoints = Checkpoints(folder, parallel=parallel.apart())
    first = 0
    if resume is not None:
        loaded = load_checkpoint(resume)
        first = loaded.step
        learner.load_policy(loaded.tensors["policy"])
        learner.load_state(loaded.tensors["optimizer"], loaded.state["learner"])
    metrics = []
    for step in range(first, STEPS):
        metrics.append(learner.learn(groups, version=VERSION - 1))
        if step + 1 == HALF:
            tensors, values = learner.state()
            checkpoints.save(step + 1, {"policy": learner.policy_state(), "optimizer": tensors}, {"learner": values})
    replica = make_policy()
    sharding.copy_weights(model, replica)
    weights = gathered(learner.policy_state())
    assert all(torch.equal(replica.state_dict()[name], tensor) for name, tensor in weights.items())
    return {"metrics": metrics, "weights": {name: value.tolist() for name, value in weights.items()}}


def adapt(parallel: Parallel, base: Path, dtype: str) -> dict[str, Any]:
    """Two updates of adapters with a KL term. What a checkpoint would hold, and what an engine would be handed."""
    values = {"name": str(base), "lora": {"rank": 2}, "dtype": dtype, "base_dtype": dtype}
    policy = build_policy(ModelConfig.model_validate(values), texts=None, critic="shared", seed=0)
    groups = [group_of(policy, number, (1.0, 0.0, 0.5)) for number in range(2)]
    algorithm = {"preset": "starpo-ppo", "kl": {"where": "loss", "coefficient": 0.1}}
    learner = Learner({"": make_trainer(policy, algorithm, parallel)})
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
    algorithm = {"preset": "dapo", "advantage": "dr_mas"}
    learner = Learner({agent: make_trainer(own, algorithm, parallel) for agent, own in policy.by_agent.items()})
    learner.learn(groups, version=VERSION - 1)
    metrics = learner.learn(groups, version=VERSION - 1)
    metrics |= learner.gradients(groups, version=VERSION - 1, buckets=1)
    metrics["signal"], metrics["noise"] = learner.signal_and_noise(groups, collected=3, version=VERSION - 1)
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
    """Return this rank's error if the second rank cannot write its part of a checkpoint."""

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
