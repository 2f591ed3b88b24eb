"""Forward pass of small Llama-like decoders with fewer and larger kernels than the modules of transformers.

A tiny model on a CPU spends more time between kernels than in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from starpod.trainer.engines.slot_cache import Feed, SlotCache
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import layer_kinds
from starpod.trainer.models.vision import ImageLlama

_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of a layer. Queries, keys and values share one matrix, and gate and up share another."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LeanDecoder:
    """Replacement of `SlotCache.run` that uses fused copies of the weights, made by `refresh`."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.model = model
        self.cache = cache
        self.epsilon: float = model.config.rms_norm_eps
        rotary = model.model.rotary_emb
        angles = torch.arange(cache.length, device=cache.device)[:, None].float() * rotary.inv_freq.float()
        # The sines contain the sign of `rotate_half`, so `run` only has to roll the halves of a vector.
        dtype = compute_dtype(model)
        self._cosines = (angles.cos().repeat(1, 2) * rotary.attention_scaling).to(dtype)
        self._sines = (torch.cat((-angles.sin(), angles.sin()), -1) * rotary.attention_scaling).to(dtype)
        self.refresh()

    @staticmethod
    def fits(model: Any) -> bool:
        """Return whether the model is supported: a known class on a CPU, without adapters or other wrapped layers."""
        if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM, ImageLlama):
            return False
        layers = model.model.layers
        return (
            model.device.type == "cpu"
            and set(layer_kinds(model.config)) == {"full_attention"}
            and model.config.hidden_act == "silu"
            and model.model.rotary_emb.rope_type == "default"
            and all(type(layer.get_submodule(name)) is nn.Linear for layer in layers for name in (*_PARTS, *_MLP))
            and all(layer.get_submodule(name).bias is None for layer in layers for name in _MLP)
        )

    def refresh(self) -> None:
        """Copy the model's current weights."""
        with torch.no_grad():
            self._layers = [self._fuse(layer) for layer in self.model.model.layers]

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        return _Layer(
            layer.input_layernorm.weight,
            torch.cat([projection.weight for projection in inputs]),
            None if inputs[0].bias is None else torch.cat([projection.bias for projection in inputs]),
            attention.o_proj.weight,
            attention.o_proj.bias,
            layer.post_attention_layernorm.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight,
        )

    def run(self, feed: Feed) -> Tensor:
        """Return hidden states of the rows, [R, hidden]."""
        cache, model = self.cache, self.model.model
        heads, key_value_heads, width = cache.heads, cache.key_value_heads, cache.width
        positions_R = feed.positions_R1[:, 0]
        cosines, sines = (table.index_select(0, positions_R)[:, None] for table in (self._cosines, self._sines))
        states = model.embed_tokens(feed.tokens_R1[:, 0])
        shape = states.shape[-1:]
        cache.begin(feed)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(states, shape, layer.attention_norm, self.epsilon)
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * key_value_heads, width)
            queries_keys = qkv[:, : heads + key_value_heads]
            queries_keys = torch.addcmul(queries_keys * cosines, queries_keys.roll(width // 2, -1), sines)
            keys, values = cache.update(queries_keys[:, heads:], qkv[:, heads + key_value_heads :], index)
            attended = cache.attend(feed, index, queries_keys[:, :heads, None], keys, values)
            states = states + linear(attended.flatten(1), layer.out, layer.out_bias)
            normed = rms_norm(states, shape, layer.mlp_norm, self.epsilon)
            gate, up = linear(normed, layer.gate_up).chunk(2, -1)
            states += linear(silu(gate).mul_(up), layer.down)
        out: Tensor = rms_norm(states, shape, model.norm.weight, self.epsilon)
        return out
