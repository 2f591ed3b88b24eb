"""Builds the configured engine. Each is imported when it is asked for: most runs need one."""

from __future__ import annotations

from starpod.trainer.engines.base import Engine
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.models.policy import Policy


def build_engine(config: EngineConfig, policy: Policy, *, max_context: int) -> Engine:
    """The engine that samples from `policy`, with contexts of up to `max_context` tokens, replies included.

    `torch` and `vllm` begin with the policy's weights as they are now; a remote server with its own, until the first
    `load`. Raises EngineError where it cannot be had.
    """
    match config.name:
        case "torch":
            from starpod.trainer.engines.torch_engine import TorchEngine

            return TorchEngine(policy, slots=config.slots, max_context=max_context)
        case "vllm":
            from starpod.trainer.engines.vllm_local import LocalVllm

            return LocalVllm(config, policy.model, max_context=max_context)
        case "vllm_remote":
            from starpod.trainer.engines.vllm_remote import RemoteVllm

            return RemoteVllm(config, max_context=max_context)
