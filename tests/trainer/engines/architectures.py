"""Tiny models with random weights of the architectures that people train, and what their layers are."""

from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.tiny import train_tokenizer

WINDOW = 8
"""Width of sliding windows, in tokens."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")} | {
    f"linear_num_{name}_heads": 2 for name in ("key", "value")
}
_MAMBA = {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 8},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "gpt_oss": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **_EXPERTS,
        **_LINEAR,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mamba2": _MAMBA,
}
"""Own settings of each architecture, by transformers' name of it."""

APART = {
    "gpt_oss": "attention sinks",
    "qwen3_next": "linear attention beside full attention",
    "mamba2": "a state space alone",
}
"""Architectures that need a cache of their own, and why."""


def make(name: str, *, head: Literal[8, 32] = 8) -> Policy:
    """A policy of an architecture, whose distribution is far from uniform. head: width of its heads."""
    tokenizer = train_tokenizer(["Up Down Left Right"], size=330)
    shape = AutoConfig.for_model(
        name,
        vocab_size=330,
        hidden_size=4 * head,
        intermediate_size=64,
        num_hidden_layers=2,
        max_position_embeddings=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head} | SHAPES[name],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return Policy(ModelConfig(), model, tokenizer, "none")
