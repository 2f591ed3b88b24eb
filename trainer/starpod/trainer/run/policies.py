"""The policies that a run begins with (one, or one per agent), and the copy that an engine samples from."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from safetensors import SafetensorError

from starpod.trainer.checkpoints.trained import INITIAL
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.engines.base import UpdateLock
from starpod.trainer.models.config import TINY
from starpod.trainer.models.policies import Policies, copy_trained
from starpod.trainer.models.policy import Policy, build_policy, load_policy
from starpod.trainer.models.precision import round_weights
from starpod.trainer.output.files import CannotWrite
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run."""

    policies: Policies
    """The policies that are trained."""
    sampler: Policies
    """The policies that the engine samples from. They are copies if the trained policies are sharded, or if they
    are updated while the engine samples."""
    make_initial: Callable[[], Policy]
    """Function that builds a policy with the run's initial weights, for a reference or a scorer."""
    updates: UpdateLock = field(default_factory=UpdateLock)
    """Lock that is held during an update."""


def build_models(config: Config, texts: Callable[[], Iterable[str]], folder: RunFolder, parallel: Parallel) -> Models:
    """Build the policies, sharded over the ranks.

    Args:
        texts: Returns training texts for the tokenizer of a tiny model, whose demonstrations may be played later.
        parallel: The ranks, all of which must call this.
    """

    def make_initial() -> Policy:
        return make_policy(config, texts, folder, parallel)

    policies = Policies.of(config.script.policies, make_initial())
    # The engine needs a whole copy of the policies in two cases. Sampling from a sharded model would need a collective
    # operation per token. If a policy is updated meanwhile, sampling would mix weights of two versions. The copy is
    # refreshed between updates.
    sampler, shares = policies, config.engine.name == "torch"
    if parallel.world > 1 and shares:
        sampler = make_replica(policies).to(parallel.device)
    for policy in policies.by_agent.values():
        sharding.shard(policy, parallel.world, parallel.device)
    if parallel.world == 1 and config.collect.max_staleness and shares:
        sampler = copy_trained(policies)
    return Models(policies, sampler, make_initial)


def make_replica(policies: Policies) -> Policies:
    """Return a copy to sample from, without critics and with weights rounded to the dtype of computation."""
    replica = copy.deepcopy(policies, {id(policy.critic): None for policy in policies.by_agent.values()})
    for policy in replica.by_agent.values():
        policy.critic_kind = "none"
        round_weights(policy.model)
    return replica


def make_policy(config: Config, texts: Callable[[], Iterable[str]], folder: RunFolder, parallel: Parallel) -> Policy:
    """Return the policy that the run begins with, equal on all ranks and after a resumption. All ranks must call this.

    Raises:
        CannotWrite: A tiny model cannot be saved.
        ModelError: The model cannot be loaded or built.
    """
    critic = config.model.critic if config.algorithm.needs_critic else "none"
    heads = config.algorithm.value_heads
    seed = derive(config.seed, "weights")
    if config.model.name != TINY:
        return build_policy(config.model, texts=None, critic=critic, seed=seed, heads=heads)
    path = folder.path / INITIAL
    if parallel.is_main and not path.exists():
        temporary = folder.path / ".temporary-initial"
        shutil.rmtree(temporary, ignore_errors=True)
        policy = build_policy(config.model, texts=list(texts()), critic=critic, seed=seed, heads=heads)
        try:
            policy.save(temporary)
            temporary.rename(path)
        except (OSError, SafetensorError) as error:
            raise CannotWrite(path, error if isinstance(error, OSError) else OSError(str(error))) from error
    parallel.barrier()
    return load_policy(path, config.model)


def forget_initial(folder: RunFolder, parallel: Parallel) -> None:
    """Remove the initial policy after a failed start. All ranks take part."""
    if parallel.is_main:
        shutil.rmtree(folder.path / INITIAL, ignore_errors=True)
    parallel.barrier()
