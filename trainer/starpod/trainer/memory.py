"""Estimates the memory of a training run per device, from its configuration and the model's shape alone.

What is kept for the backward pass was counted on Llama's layers in transformers: bytes per token and layer that follow
from the widths. The rest is arithmetic on numbers of parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from starpod.trainer.config import Config
from starpod.trainer.engines.factory import slots_within
from starpod.trainer.engines.slot_cache import cache_shape
from starpod.trainer.engines.weights import SHARD_BYTES
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import build_shape
from starpod.trainer.models.trunk import plain
from starpod.trainer.parallel import device_named

GIB = 2**30
FLOAT32 = 4
PROGRAM = {"cpu": 0.45 * GIB, "cuda": 1.0 * GIB}
"""Python with its libraries; what CUDA and its kernels take of a GPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device of a rank. size: bytes of memory; on a CPU this rank's share. world: ranks that share the model."""

    kind: Literal["cpu", "cuda"]
    size: int
    world: int = 1


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory. size: bytes. keys: those that lower it. phase: when it is held; empty: always."""

    what: str
    size: float
    keys: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one rank, in bytes. Of the phases, one is held at a time."""

    items: Sequence[Item]
    place: Place

    @property
    def total(self) -> float:
        """Sum of what is always held and of the largest phase."""
        return sum(item.size for item in self.items if item.phase in ("", self._widest))

    @property
    def fits(self) -> bool:
        return self.total <= self.place.size

    @property
    def _widest(self) -> str:
        phases = {item.phase for item in self.items if item.phase}
        return max(phases, key=lambda phase: sum(item.size for item in self.items if item.phase == phase), default="")

    def table(self) -> list[str]:
        """Lines of text: a row for each use, then the total."""
        shards = f" of {self.place.world}" if self.place.world > 1 else ""
        lines = [f"Memory per device{shards}, GiB (estimated)"]
        for item in self.items:
            phase = f"  (during {item.phase})" if item.phase else ""
            lines.append(f"{item.size / GIB:9.2f}  {item.what}{phase}")
        lines.append(f"{self.total / GIB:9.2f}  at most at a time, of {self.place.size / GIB:.1f} ({self.place.kind})")
        return lines

    def advice(self) -> str:
        """A sentence for what does not fit: how much there is, and which keys lower the most."""
        held = [item for item in self.items if item.phase in ("", self._widest) and item.keys]
        largest = sorted(held, key=lambda item: -item.size)[:4]
        told = ", ".join(f"{item.what} {item.size / GIB:.1f} ({item.keys})" for item in largest)
        return (
            f"the run needs about {self.total / GIB:.0f} GiB of the {self.place.size / GIB:.0f} GiB that each device "
            f"({self.place.kind}) has. Change what takes most: {told}"
        )


def place_of(device: str) -> Place:
    """The device that a rank of this run would compute on, and how many ranks torchrun started. Raises NoDevice."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    chosen = device_named(device)
    if chosen.type == "cuda":
        return Place("cuda", torch.cuda.get_device_properties(chosen).total_memory, world)
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        size = min(size, int(text))
    return Place("cpu", size // local, world)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of parameters and widths of a model. largest: parameters of its largest weight. adapters: of LoRA."""

    parameters: int
    adapters: int
    per_layer: int
    largest: int
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int
    config: Any

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        built = build_shape(model)
        every = [parameter.numel() for name, parameter in built.named_parameters() if ".lora_" not in name]
        adapters = sum(parameter.numel() for name, parameter in built.named_parameters() if ".lora_" in name)
        config = plain(built).config.get_text_config()
        _, _, _, heads, _, width = cache_shape(config, 0, 1)
        inside = sum(p.numel() for name, p in built.named_parameters() if ".layers." in name and ".lora_" not in name)
        return cls(
            sum(every),
            adapters,
            inside // config.num_hidden_layers,
            max(every),
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            heads * width,
            config.vocab_size,
            config,
        )


def estimate_memory(config: Config, place: Place) -> Estimate:
    """Estimates what a rank holds at most. Raises ModelError where the model's shape cannot be had, EngineError where
    the engine's cache has no room for one reply."""
    model, algorithm, world = config.model, config.algorithm, place.world
    shape = Shape.of(model)
    lora = model.lora.rank > 0
    kept = getattr(torch, model.base_dtype).itemsize
    trained = _policies(config) * (shape.adapters if lora else shape.parameters)
    frozen = shape.parameters if lora else 0
    resident = trained * FLOAT32 + frozen * kept
    size = "another model" + ("" if lora else ", model.lora.rank") + ("" if world > 1 else ", several GPUs (torchrun)")
    base = f"{size}, model.base_dtype" if lora and kept == FLOAT32 else size
    items = [
        Item("program", PROGRAM[place.kind]),
        Item("weights", resident / world, base),
        Item("gradients", trained * FLOAT32 / world, size),
        Item("optimiser (AdamW)", 2 * trained * FLOAT32 / world, size),
    ]
    if algorithm.needs_critic and model.critic == "separate":
        items.append(Item("critic", (resident + 3 * trained * FLOAT32) / world, "model.critic=shared"))
    if algorithm.needs_reference:
        items.append(Item("reference model", trained * FLOAT32 / world, "algorithm.kl.where=off"))
    if world > 1:
        # Two layers, and what is in none of them, with their gradients.
        whole = shape.parameters - (shape.layers - 2) * shape.per_layer
        items.append(Item("gathered shards", whole * (kept if lora else 2 * FLOAT32), size))
    return Estimate([*items, *_engine(config, place, shape), *_passes(config, place, shape)], place)


def _policies(config: Config) -> int:
    """How many are trained: one, or one for each agent."""
    return max(len(config.script.policies), 1)


def _engine(config: Config, place: Place, shape: Shape) -> list[Item]:
    """Of the engine, where it samples on this machine, and of the hand-over of weights."""
    engine, model = config.engine, config.model
    longest = config.sampling.max_episode_tokens
    dtype: torch.dtype = getattr(torch, engine.computes_in(model.dtype))
    handed = shape.parameters * dtype.itemsize
    if engine.name == "torch":
        policies = _policies(config)
        part = engine.model_copy(update={"cache_gib": engine.cache_gib / policies})
        slots = slots_within(part, shape.config, longest, dtype)
        shared = place.world == 1
        rounded = shape.adapters if model.base_dtype == model.dtype else shape.parameters + shape.adapters
        copied = 0 if shared and model.dtype == "float32" else (rounded if shared else shape.parameters)
        cache = policies * math.prod(cache_shape(shape.config, slots, longest)) * dtype.itemsize
        fused = place.kind == "cpu" and model.dtype == "float32"
        weights = copied * dtype.itemsize + (shape.parameters * FLOAT32 if fused else 0)
        items = [
            Item("engine's weights", policies * weights),
            Item(f"engine's cache, {slots} replies at once", cache, "engine.cache_gib, engine.slots"),
        ]
        if shared and config.collect.max_staleness:
            own = FLOAT32 * policies * (shape.adapters or shape.parameters)
            items.append(Item("weights to sample from during updates", own, "collect.max_staleness=0"))
        return items
    bucket = min(handed, SHARD_BYTES) + shape.largest * FLOAT32
    if engine.name == "vllm_remote":
        on_device = bucket if place.kind == "cpu" else shape.largest * FLOAT32
        return [Item("hand-over of weights", on_device, "", "hand-over")]
    if place.kind == "cuda":
        ipc = engine.handover == "ipc" or (engine.handover == "auto" and engine.tensor_parallel == 1)
        taken = engine.gpu_memory_fraction * place.size
        fewer = "engine=vllm_remote" if engine.sleep else "engine.sleep, engine=vllm_remote"
        return [
            # Awake for the hand-over, which takes more than sampling.
            Item("engine (vLLM)", taken, f"engine.gpu_memory_fraction, {fewer}", "hand-over" if engine.sleep else ""),
            *([Item("engine asleep (vLLM)", PROGRAM["cuda"])] if engine.sleep else []),
            Item("hand-over of weights", handed if ipc else shape.largest * FLOAT32, "engine.handover", "hand-over"),
        ]
    cache = math.prod(cache_shape(shape.config, engine.slots, longest)) * dtype.itemsize
    return [
        Item("engine (vLLM)", handed + PROGRAM["cpu"], "engine=vllm_remote"),
        Item("engine's cache", min(math.ceil(cache / GIB) * GIB, place.size / 4), "engine.slots"),
        Item("hand-over of weights", bucket, "", "hand-over"),
    ]


def kept_for_backward(config: ModelConfig, shape: Shape, tokens: int) -> int:
    """Bytes that a forward pass of the model's layers keeps for the way back."""
    size: int = getattr(torch, config.dtype).itemsize
    layer = tokens * _per_token(config, shape)
    # Weights that are rounded for the pass are kept too.
    rounded = shape.per_layer * size if size < FLOAT32 and getattr(torch, config.base_dtype) != torch.bfloat16 else 0
    if config.gradient_checkpointing:
        return shape.layers * tokens * size * shape.hidden
    return shape.layers * (layer + rounded)


def _per_token(config: ModelConfig, shape: Shape) -> int:
    """Of one layer and token: eight tensors of the model's width and what the norms keep in float32, keys and values,
    four of the MLP's width."""
    size: int = getattr(torch, config.dtype).itemsize
    norms = 10 * shape.hidden if size < FLOAT32 else 0
    every: int = size * (8 * shape.hidden + 2 * shape.key_value + 4 * shape.intermediate) + norms
    return every


def _passes(config: Config, place: Place, shape: Shape) -> list[Item]:
    """Of a micro-batch's forward and backward pass, and of the optimiser's step."""
    model, longest = config.model, config.sampling.max_episode_tokens
    episodes = config.collect.groups * config.collect.group_size
    tokens = max(min(config.optimizer.micro_batch_tokens, episodes * longest), longest)
    # The ends of the model; a layer that is computed again, or its gradients.
    held = kept_for_backward(model, shape, tokens) + tokens * (8 * shape.hidden + _per_token(model, shape))
    if model.critic == "separate" and config.algorithm.needs_critic:
        held *= 2
    size = getattr(torch, model.dtype).itemsize
    # Logits as they are made, in float32, their logarithm and its gradient; the gradient of the largest weight.
    logits = min(model.logits_at_once, tokens * shape.vocabulary) * (size + 3 * FLOAT32)
    logits += shape.largest * (FLOAT32 + (2 * size if size < FLOAT32 else 0))
    lower = "optimizer.micro_batch_tokens, sampling.max_episode_tokens"
    more = "" if model.gradient_checkpointing else ", model.gradient_checkpointing"
    items = [
        Item("activations", held, lower + more, "an update"),
        Item("logits", logits, "model.logits_at_once", "an update"),
    ]
    if place.kind == "cuda":
        trained = shape.adapters or shape.parameters
        items.append(Item("AdamW's step", trained * FLOAT32 / place.world, "", "the optimiser's step"))
    return items
