"""Loading of a trained policy from a checkpoint of its run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starpod.trainer.checkpoints.checkpoint import (
    MANIFEST,
    CheckpointError,
    Checkpoints,
    Loaded,
    Score,
    load_checkpoint,
)
from starpod.trainer.checkpoints.state import split_agents
from starpod.trainer.models.config import TINY, ModelConfig
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import build_policy, load_policy
from starpod.trainer.parallel import sharding

Which = Literal["best", "latest"]

INITIAL = "initial"
"""Folder in the run folder with the initial policy and tokenizer of a model that was built from scratch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained policy and facts about its run."""

    policies: Policies
    """Policies with the checkpoint's weights and no critic."""
    config: Mapping[str, Any]
    """The run's configuration as plain values."""
    step: int
    """Number of finished iterations."""
    score: Score | None
    """Success and mean return of the evaluation at the checkpoint; None if there was no evaluation."""
    path: Path
    """Folder of the checkpoint."""
    run: Path
    """Folder of the run."""


def is_run_or_checkpoint(path: Path) -> bool:
    """Return whether `load_trained` accepts this path."""
    return os.path.isfile(path / MANIFEST) or os.path.isdir(path / "checkpoints")


def load_trained(path: Path, which: Which = "best") -> Trained:
    """Load the policy from a run folder or from one checkpoint in it.

    Args:
        which: Checkpoint to load from a run folder. `best` is the one with the best evaluation, or the newest if none
            was evaluated; `latest` is the newest.

    Raises:
        CheckpointError: No checkpoint can be used.
        ModelError: The model that training began from cannot be loaded.
    """
    checkpoint = find_checkpoint(path, which)
    checkpoint.check_finite()
    run = checkpoint.path.parent.parent
    config: Mapping[str, Any] = checkpoint.state["config"]
    model = ModelConfig.model_validate(config["model"])
    if model.name == TINY:
        base_policy = load_policy(initial_of(checkpoint))
    else:
        base_policy = build_policy(model, texts=None, critic="none", seed=0)
    base_policy.critic, base_policy.critic_kind = None, "none"
    policies = Policies.of(config.get("script", {}).get("policies", ()), base_policy)
    states = split_agents(checkpoint.tensors["policy"], policies.by_agent)
    for agent, policy in policies.by_agent.items():
        state = {name: tensor for name, tensor in states[agent].items() if not name.startswith("critic.")}
        sharding.load_full_state_dict(policy, state, without=policy.frozen())
    return Trained(policies, config, checkpoint.step, checkpoint.score, checkpoint.path, run)


def initial_of(checkpoint: Loaded) -> Path:
    """Return the folder INITIAL of a checkpoint's run. Raises CheckpointError if it is not there."""
    folder = checkpoint.path.parent.parent / INITIAL
    if not folder.is_dir():
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} is of a model built from scratch, whose tokenizer is in {folder}: keep "
            "the checkpoint in its run folder"
        )
    return folder


def find_checkpoint(path: Path, which: Which = "best", names: Collection[str] = ("policy",)) -> Loaded:
    """Read the checkpoint that `load_trained` loads. names: see `load_checkpoint`. Raises CheckpointError."""
    path = Path(path).resolve()
    if (path / MANIFEST).is_file():
        return load_checkpoint(path, names)
    if not (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path} is neither a run's folder nor one of its checkpoints (checkpoints/step-...)")
    checkpoints = Checkpoints(path / "checkpoints")
    checkpoint = (checkpoints.best(names) if which == "best" else None) or checkpoints.latest(names)
    if checkpoint is None:
        raise CheckpointError(f"the run {path} has no checkpoint yet")
    return checkpoint
