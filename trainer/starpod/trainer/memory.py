"""Estimate of a training run's memory per device, from its configuration and the model's shape.

The tensors kept for the backward pass were counted on Llama's layers in transformers, as bytes per token and layer that
follow from the widths. The rest is arithmetic on numbers of parameters.
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
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.parallel import device_named

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
    """Configuration keys that lower it."""
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
        """Return a table as lines of text, with a row per use and a total."""
        shards = f" of {self.place.world}" if self.place.world > 1 else ""
        lines = [f"Memory per device{shards}, GiB (estimated)"]
        for item in self.items:
            phase = f"  (during {item.phase})" if item.phase else ""
            lines.append(f"{item.size / GIB:9.2f}  {item.what}{phase}")
        lines.append(f"{self.total / GIB:9.2f}  at most at a time, of {self.place.size / GIB:.1f} ({self.place.kind})")
        return lines

    def advice(self) -> str:
        """Return a sentence for a run that does not fit: the memory available, and the keys that save the most."""
        held = [item for item in self.items if item.phase in ("", self._widest) and item.keys]
        largest = sorted(held, key=lambda item: -item.size)[:4]
        told = ", ".join(f"{item.what} {item.size / GIB:.1f} ({item.keys})" for item in largest)
        return (
            f"the run needs about {self.total / GIB:.0f} GiB of the {self.place.size / GIB:.0f} GiB that each device "
            f"({self.place.kind}) has. Change what takes most: {told}"
        )


def place_of(device: str) -> Place:
    """Return the device that a rank of this run would use, and the number of ranks from torchrun. Raises NoDevice."""
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
    """Numbers of parameters and widths of a model."""

    parameters: int
    adapters: int
    """Parameters of LoRA adapters."""
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
        built = build_shape(model)
        every = [parameter.numel() for name, parameter in built.named_parameters() if ".lora_" not in name]
        adapters = sum(parameter.numel() for name, parameter in built.named_parameters() if ".lora_" in name)
        config = unwrapped(built).config.get_text_config()
        _, _, _, heads, _, width = cache_shape(config, 0, 1)
        inside = sum(p.numel() for name, p in built.named_parameters() if ".layers." in name and ".lora_" not in name)
        return cls(
            sum(every),
            adapters,
            inside // config.num_hidden_layers,
            max(every),
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
    if place.kind == "cpu":  # on a GPU the copy is in main memory
        items.append(Item("copy for a checkpoint", 3 * trained * FLOAT32 / world, "", "a checkpoint"))
    if algorithm.needs_critic and model.critic == "separate":
        items.append(Item("critic", (resident + 3 * trained * FLOAT32) / world, "model.critic=shared"))
    if algorithm.needs_reference:
        items.append(Item("reference model", trained * FLOAT32 / world, "algorithm.kl.where=off"))
    if world > 1:
        # FSDP gathers two layers at a time and all parameters outside of layers, with their gradients.
        whole = shape.parameters - (shape.layers - 2) * shape.per_layer
        items.append(Item("gathered shards", whole * (kept if lora else 2 * FLOAT32), size))
    return Estimate([*items, *_engine(config, place, shape), *_passes(config, place, shape)], place)


def _policies(config: Config) -> int:
    """Return the number of trained policies: one, or one per agent."""
    return max(len(config.script.policies), 1)


def _engine(config: Config, place: Place, shape: Shape) -> list[Item]:
    """Return the memory of an engine on this machine, and of handing over weights."""
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
            # The engine is awake during the hand-over, which needs more memory than sampling.
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
    """Return the bytes that a forward pass of the layers keeps for the backward pass."""
    size: int = getattr(torch, config.dtype).itemsize
    layer = tokens * _per_token(config, shape)
    # Weights that are rounded for the pass are kept as well.
    rounded = shape.per_layer * size if size < FLOAT32 and getattr(torch, config.base_dtype) != torch.bfloat16 else 0
    if config.gradient_checkpointing:
        return shape.layers * tokens * size * shape.hidden
    return shape.layers * (layer + rounded)


def _per_token(config: ModelConfig, shape: Shape) -> int:
    """Return the bytes kept per layer and token.

    They are eight tensors of the model's width, float32 values of the norms, keys and values, and four tensors of the
    MLP's width.
    """
    size: int = getattr(torch, config.dtype).itemsize
    norms = 10 * shape.hidden if size < FLOAT32 else 0
    every: int = size * (8 * shape.hidden + 2 * shape.key_value + 4 * shape.intermediate) + norms
    return every


def _passes(config: Config, place: Place, shape: Shape) -> list[Item]:
    """Return the memory of a micro-batch's forward and backward pass, and of the optimiser's step."""
    model, longest = config.model, config.sampling.max_episode_tokens
    episodes = config.collect.groups * config.collect.group_size
    tokens = max(min(config.optimizer.micro_batch_tokens, episodes * longest), longest)
    # Add the model's input and output, and one layer that is recomputed, or its gradients.
    held = kept_for_backward(model, shape, tokens) + tokens * (8 * shape.hidden + _per_token(model, shape))
    if model.critic == "separate" and config.algorithm.needs_critic:
        held *= 2
    size = getattr(torch, model.dtype).itemsize
    # Logits in the model's dtype and in float32, their log-softmax and its gradient; then the gradient of the largest
    # weight, and if a pass rounds, the rounded weight and its gradient, all but the first by slices if they are large.
    rounds = size < FLOAT32
    if rounds and max(tokens, shape.hidden) * shape.vocabulary > model.logits_at_once:
        logits = model.logits_at_once * (2 * FLOAT32 + 4 * size) + shape.largest * FLOAT32
    else:
        logits = min(model.logits_at_once, tokens * shape.vocabulary) * (size + 3 * FLOAT32)
        logits += shape.largest * (FLOAT32 + 2 * size * rounds)
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
