"""Factory of the configured engine. Engines are imported on demand, because most runs need only one."""

from __future__ import annotations

import math
from typing import Any

import torch

from starpod.trainer.engines.base import Engine, EngineError, UpdateLock
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.routing import RoutingEngine
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.parallel.ranks import Parallel


def build_engines(
    config: EngineConfig,
    policies: Policies,
    *,
    max_context: int,
    parallel: Parallel | None = None,
    updates: UpdateLock | None = None,
) -> Engine:
    """Build the engine that samples from all policies.

    Args:
        config: The engine. If there are several policies, each gets an equal part of the cache.
        max_context: Maximum number of tokens of prompt and reply together.
        parallel: The ranks that sample; needed for engines that hand over the weights of a sharded model.
        updates: Lock that the caller holds while it updates the policies, if the engine samples meanwhile.

    Raises:
        EngineError: The engine is unavailable, or it cannot sample from several policies.
    """
    engine_config = config.model_copy(update={"cache_gib": config.cache_gib / len(policies.by_agent)})
    if len(policies.by_agent) > 1 and config.name != "torch":
        raise EngineError(
            f"engine {config.name} samples from one policy, but script.policies has one for each agent: choose the "
            "engine torch"
        )
    engines = {
        agent: build_engine(engine_config, policy, max_context=max_context, parallel=parallel, updates=updates)
        for agent, policy in policies.by_agent.items()
    }
    return RoutingEngine(engines) if len(engines) > 1 else engines.popitem()[1]


def build_engine(
    config: EngineConfig,
    policy: Policy,
    *,
    max_context: int,
    parallel: Parallel | None = None,
    updates: UpdateLock | None = None,
) -> Engine:
    """Build the engine that samples from `policy`. The other arguments are those of `build_engines`.

    `torch` and `vllm` start with the policy's current weights. Remote servers keep their own until the first `load`.
    Raises EngineError if the engine is unavailable.
    """
    match config.name:
        case "torch":
            from starpod.trainer.engines.torch_engine import TorchEngine

            slots = slots_within(config, unwrapped(policy.model).config, max_context, compute_dtype(policy.model))
            return TorchEngine(policy, slots=slots, max_context=max_context)
        case "vllm":
            from starpod.trainer.engines.vllm_local import LocalVllm

            return LocalVllm(config, policy, max_context=max_context, parallel=parallel, updates=updates)
        case "vllm_remote":
            from starpod.trainer.engines.vllm_remote import RemoteVllm

            return RemoteVllm(config, max_context=max_context, vocabulary=policy.vocabulary, parallel=parallel)


def slots_within(config: EngineConfig, model_config: Any, length: int, dtype: torch.dtype) -> int:
    """Return the number of conversations that fit into `cache_gib`, at most `slots`.

    Args:
        config: The engine, whose `cache_gib` and `slots` are the limits.
        length: Number of tokens of a conversation.

    Raises:
        EngineError: None fits.
    """
    from starpod.trainer.engines.slot_cache import cache_shape

    size = math.prod(cache_shape(model_config, 0, length)) * dtype.itemsize
    room = int(config.cache_gib * 2**30) // size - 1  # one slot is for padding rows
    if room < 1:
        raise EngineError(
            f"a context of {length} tokens takes {size / 2**30:.2f} GiB in the torch engine's cache, and two "
            f"contexts must fit into engine.cache_gib ({config.cache_gib:g}): raise it, or lower "
            "sampling.max_episode_tokens"
        )
    return min(config.slots, room)
