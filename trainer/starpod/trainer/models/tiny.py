"""A small decoder with random weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from starpod.trainer.models.config import ModelConfig


def build_tiny(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Qwen2's architecture, with weights that follow from `seed` alone. The global random state is left as it was.

    It goes by the name of Llama, with biases: transformers gives every folder of type qwen2 Qwen's own tokenizer, and
    would ignore the one that is saved beside this model.
    """
    tiny = config.tiny
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden,
        intermediate_size=tiny.intermediate,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.key_value_heads or tiny.heads,
        max_position_embeddings=tiny.positions,
        rope_parameters={"rope_type": "default", "rope_theta": tiny.rope_theta},
        tie_word_embeddings=tiny.tied,
        # With them a query can ask for a distance alone, whatever stands there.
        attention_bias=True,
        # As wide as the model is narrow: the 0.02 of large models leaves a small one almost linear for many steps.
        initializer_range=0.5 * tiny.hidden**-0.5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    shape._attn_implementation = config.attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape)
