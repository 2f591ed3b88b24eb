"""Estimate of a training run's memory per device, from its configuration and the model's shape.

The size of the tensors kept for the backward pass is computed per token and layer, from the layer's widths. These
tensors were counted in transformers' Llama. The other items are computed from numbers of parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from starpod.trainer.configuration.config import Config
from starpod.trainer.engines.factory import slots_within
from starpod.trainer.engines.slot_cache import cache_shape
from starpod.trainer.engines.weights import SHARD_BYTES
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import build_shape
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.parallel.ranks import device_named
from starpod.trainer.run.teachers import model_of_teacher

GIB = 2**30
FLOAT32 = 4
PROGRAM = {"cpu": 0.45 * GIB, "cuda": 1.0 * GIB}
"""Bytes used by Python with its libraries, and on a GPU by CUDA and its kernels."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device of a rank."""

    kind: Literal["cpu", "cuda"]
    size: int
    """Bytes of memory; on a CPU this rank's share."""
    world: int = 1
    """Number of ranks that share the model."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item that uses memory."""

    what: str
    size: float
    """Size in bytes."""
    keys: str = ""
    """Configuration keys that reduce this item's size."""
    phase: str = ""
    """Phase during which it is held; "" means always."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one rank, in bytes. Only one phase's items are held at a time."""

    items: Sequence[Item]
    place: Place

    @property
    def total(self) -> float:
        """Bytes held permanently plus the bytes of the largest phase."""
        return sum(item.size for item in self.items if item.phase in ("", self._widest))

    @property
    def fits(self) -> bool:
        return self.total <= self.place.size

    @property
    def _widest(self) -> str:
        phases = {item.phase for item in self.items if item.phase}
        return max(phases, key=lambda phase: sum(item.size for item in self.items if item.phase == phase), default="")

    def table(self) -> list[str]:
        """Return a table as lines of text, with one row per item and a total."""
        shards = f" of {self.place.world}" if self.place.world > 1 else ""
        lines = [f"Memory per device{shards}, GiB (estimated)"]
        for item in self.items:
            phase = f"  (during {item.phase})" if item.phase else ""
            lines.append(f"{item.size / GIB:9.2f}  {item.what}{phase}")
        lines.append(f"{self.total / GIB:9.2f}  peak, of {self.place.size / GIB:.1f} ({self.place.kind})")
        return lines

    def advice(self) -> str:
        """Return a sentence for a run that does not fit: the memory available, and the keys that save the most."""
        items = [item for item in self.items if item.phase in ("", self._widest) and item.keys]
        largest_items = sorted(items, key=lambda item: -item.size)[:4]
        summary = ", ".join(f"{item.what} {item.size / GIB:.1f} ({item.keys})" for item in largest_items)
        return (
            f"the run needs about {self.total / GIB:.0f} GiB of the {self.place.size / GIB:.0f} GiB that each device "
            f"({self.place.kind}) has. Change the largest parts: {summary}"
        )


def place_of(device: str) -> Place:
    """Return the device that a rank of this run would use, and the number of ranks from torchrun. Raises NoDevice."""
    world, local_world = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    torch_device = device_named(device)
    if torch_device.type == "cuda":
        return Place("cuda", torch.cuda.get_device_properties(torch_device).total_memory, world)
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        size = min(size, int(text))
    return Place("cpu", size // local_world, world)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of parameters and widths of a model."""

    parameters: int
    adapters: int
    """Number of parameters of LoRA adapters."""
    per_layer: int
    largest: int
    """Number of entries of the largest weight tensor."""
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int
    config: Any

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        module = build_shape(model)
        sizes = [parameter.numel() for name, parameter in module.named_parameters() if ".lora_" not in name]
        adapters = sum(parameter.numel() for name, parameter in module.named_parameters() if ".lora_" in name)
        config = unwrapped(module).config.get_text_config()
        _, _, _, heads, _, width = cache_shape(config, 0, 1)
        total = sum(p.numel() for name, p in module.named_parameters() if ".layers." in name and ".lora_" not in name)
        return cls(
            sum(sizes),
            adapters,
            total // config.num_hidden_layers,
            max(sizes),
            config.num_hidden_layers,
            config.hidden_size,
            getattr(config, "intermediate_size", 2 * config.hidden_size),
            heads * width,
            config.vocab_size,
            config,
        )


def estimate_memory(config: Config, place: Place) -> Estimate:
    """Estimate the peak memory of a rank.

    Raises:
        ModelError: The model's shape cannot be loaded.
        EngineError: The engine's cache has no room for one reply.
    """
    model, algorithm, world = config.model, config.algorithm, place.world
    shape = Shape.of(model)
    lora = model.lora.rank > 0
    item_size = getattr(torch, model.base_dtype).itemsize
    trained_count = _policies(config) * (shape.adapters if lora else shape.parameters)
    frozen_count = shape.parameters if lora else 0
    weight_bytes = trained_count * FLOAT32 + frozen_count * item_size
    keys = "another model" + ("" if lora else ", model.lora.rank") + ("" if world > 1 else ", several GPUs (torchrun)")
    base_keys = f"{keys}, model.base_dtype" if lora and item_size == FLOAT32 else keys
    teacher = model_of_teacher(config.teaching, model)
    items = [
        Item("program", PROGRAM[place.kind]),
        Item("weights", weight_bytes / world, base_keys),
        Item("gradients", trained_count * FLOAT32 / world, keys),
        Item("optimiser (AdamW)", 2 * trained_count * FLOAT32 / world, keys),
    ]
    if place.kind == "cpu":  # on a GPU the copy is in main memory
        items.append(Item("copy for a checkpoint", 3 * trained_count * FLOAT32 / world, "", "a checkpoint"))
    if algorithm.needs_critic and model.critic == "separate":
        items.append(Item("critic", (weight_bytes + 3 * trained_count * FLOAT32) / world, "model.critic=shared"))
    if algorithm.needs_reference:
        items.append(Item("reference model", trained_count * FLOAT32 / world, "algorithm.kl.where=off"))
    if teacher is not None:  # rounded to the dtype of computation, unless it is sharded
        teacher_item_size = FLOAT32 if world > 1 else getattr(torch, teacher.dtype).itemsize
        size = Shape.of(teacher).parameters * teacher_item_size / world
        items.append(Item("teacher", size, "another algorithm.distillation.model, or teacher vllm"))
    if world > 1:
        # FSDP gathers two layers at a time and all parameters outside of layers, with their gradients.
        gathered_count = shape.parameters - (shape.layers - 2) * shape.per_layer
        items.append(Item("gathered shards", gathered_count * (item_size if lora else 2 * FLOAT32), keys))
    return Estimate([*items, *_engine(config, place, shape), *_passes(config, place, shape)], place)


def _policies(config: Config) -> int:
    """Return the number of trained policies: one, or one per agent."""
    return max(len(config.script.policies), 1)


def _engine(config: Config, place: Place, shape: Shape) -> list[Item]:
    """Return the memory items of an engine on this machine and of transferring weights to it."""
    engine, model = config.engine, config.model
    max_length = config.sampling.max_episode_tokens
    dtype: torch.dtype = getattr(torch, engine.computes_in(model.dtype))
    payload = shape.parameters * dtype.itemsize
    if engine.name == "torch":
        policies = _policies(config)
        part = engine.model_copy(update={"cache_gib": engine.cache_gib / policies})
        slots = slots_within(part, shape.config, max_length, dtype)
        shared = place.world == 1
        rounded_count = shape.adapters if model.base_dtype == model.dtype else shape.parameters + shape.adapters
        copied_count = 0 if shared and model.dtype == "float32" else (rounded_count if shared else shape.parameters)
        cache = policies * math.prod(cache_shape(shape.config, slots, max_length)) * dtype.itemsize
        fused = place.kind == "cpu" and model.dtype == "float32"
        weights = copied_count * dtype.itemsize + (shape.parameters * FLOAT32 if fused else 0)
        items = [
            Item("engine's weights", policies * weights),
            Item(f"engine's cache, {slots} replies at once", cache, "engine.cache_gib, engine.slots"),
        ]
        if shared and config.collect.max_staleness:
            copy_bytes = FLOAT32 * policies * (shape.adapters or shape.parameters)
            items.append(Item("weights to sample from during updates", copy_bytes, "collect.max_staleness=0"))
        return items
    bucket = min(payload, SHARD_BYTES) + shape.largest * FLOAT32
    if engine.name == "vllm_remote":
        device_bytes = bucket if place.kind == "cpu" else shape.largest * FLOAT32
        return [Item("hand-over of weights", device_bytes, "", "hand-over")]
    if place.kind == "cuda":
        ipc = engine.handover == "ipc" or (engine.handover == "auto" and engine.tensor_parallel == 1)
        usage = engine.gpu_memory_fraction * place.size
        keys = "engine=vllm_remote" if engine.sleep else "engine.sleep, engine=vllm_remote"
        return [
            # The engine is awake during the hand-over, which needs more memory than sampling.
            Item("engine (vLLM)", usage, f"engine.gpu_memory_fraction, {keys}", "hand-over" if engine.sleep else ""),
            *([Item("engine asleep (vLLM)", PROGRAM["cuda"])] if engine.sleep else []),
            Item("hand-over of weights", payload if ipc else shape.largest * FLOAT32, "engine.handover", "hand-over"),
        ]
    cache = math.prod(cache_shape(shape.config, engine.slots, max_length)) * dtype.itemsize
    return [
        Item("engine (vLLM)", payload + PROGRAM["cpu"], "engine=vllm_remote"),
        Item("engine's cache", min(math.ceil(cache / GIB) * GIB, place.size / 4), "engine.slots"),
        Item("hand-over of weights", bucket, "", "hand-over"),
    ]


def kept_for_backward(config: ModelConfig, shape: Shape, tokens: int) -> int:
    """Return the number of bytes that a forward pass of the layers keeps for the backward pass.

    Args:
        tokens: Number of tokens of the pass, including padding.
    """
    size: int = getattr(torch, config.dtype).itemsize
    layer = tokens * _per_token(config, shape)
    # Weights that are rounded for the pass are kept as well.
    weights = shape.per_layer * size if size < FLOAT32 and getattr(torch, config.base_dtype) != torch.bfloat16 else 0
    if config.gradient_checkpointing:
        return shape.layers * tokens * size * shape.hidden
    return shape.layers * (layer + weights)


def _per_token(config: ModelConfig, shape: Shape) -> int:
    """Return the number of bytes kept for the backward pass, per layer and token.

    Each token keeps eight vectors of the model's width, its keys and values, four vectors of the MLP's width and, if
    it computes in bfloat16, float32 values of the norms.
    """
    size: int = getattr(torch, config.dtype).itemsize
    norms = 10 * shape.hidden if size < FLOAT32 else 0
    total: int = size * (8 * shape.hidden + 2 * shape.key_value + 4 * shape.intermediate) + norms
    return total


def _passes(config: Config, place: Place, shape: Shape) -> list[Item]:
    """Return the memory of a micro-batch's forward and backward pass, and of the optimiser's step."""
    model, max_length = config.model, config.sampling.max_episode_tokens
    episodes = config.collect.groups * config.collect.group_size
    tokens = max(min(config.optimizer.micro_batch_tokens, episodes * max_length), max_length)
    # Add the model's input and output, and one layer that is recomputed, or its gradients.
    activations = kept_for_backward(model, shape, tokens) + tokens * (8 * shape.hidden + _per_token(model, shape))
    if model.critic == "separate" and config.algorithm.needs_critic:
        activations *= 2
    size = getattr(torch, model.dtype).itemsize
    # Logits in the model's dtype and in float32, their log-softmax and its gradient; then the gradient of the largest
    # weight, and if a pass rounds, the rounded weight and its gradient, all but the first by slices if they are large.
    rounds = size < FLOAT32
    if rounds and max(tokens, shape.hidden) * shape.vocabulary > model.logits_at_once:
        logits = model.logits_at_once * (2 * FLOAT32 + 4 * size) + shape.largest * FLOAT32
    else:
        logits = min(model.logits_at_once, tokens * shape.vocabulary) * (size + 3 * FLOAT32)
        logits += shape.largest * (FLOAT32 + 2 * size * rounds)
    keys = "optimizer.micro_batch_tokens, sampling.max_episode_tokens"
    extra_keys = "" if model.gradient_checkpointing else ", model.gradient_checkpointing"
    items = [
        Item("activations", activations, keys + extra_keys, "an update"),
        Item("logits", logits, "model.logits_at_once", "an update"),
    ]
    if place.kind == "cuda":
        trained_count = shape.adapters or shape.parameters
        items.append(Item("AdamW's step", trained_count * FLOAT32 / place.world, "", "the optimiser's step"))
    return items
