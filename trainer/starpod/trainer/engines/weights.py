"""A model's weights as vLLM loads them: names and tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import plain
from starpod.trainer.parallel import reshard, whole

SHARD_BYTES = 4 * 1024**3
PREFIX = "starpod-vllm-"
LOCKED_WITHIN_SECONDS = 60.0
"""Age from which on a temporary folder that nobody has locked is left over from a killed process."""


def device_of(model: nn.Module) -> torch.device:
    """Where the model's weights are."""
    return next(model.parameters()).device


def weights_of(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Each parameter once, whole, detached, under its name in the checkpoint.

    dtype: of what is given; None: the one that the model computes in.

    Shards of FSDP are gathered one parameter at a time, as each is asked for, which every rank has to take part in.
    Adapters of PEFT are added to the layer that they belong to. Tied weights come under their first name, as in a
    checkpoint.
    """
    dtype = dtype or compute_dtype(model)
    reshard(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = whole(parameter)
        layer, below, _ = name.rpartition(".base_layer.weight")
        if below:
            weight = weight + _adapters(model.get_submodule(layer), weight)
        weight = weight.to(dtype)
        yield _plain_name(name), weight
        del weight  # before the next one is gathered


def shapes_of(model: nn.Module) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of what `weights_of` gives, without gathering anything."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield _plain_name(name), list(parameter.shape)


def _plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def make_folder(parent: str) -> Path:
    """A fresh folder for weights: in `parent`, as readable as other files there, or a private temporary one."""
    if not parent:
        _remove_left_over(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        _lock(folder)  # held until this process ends
        return folder
    folder = Path(parent).resolve() / f"{PREFIX}{uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    return folder


def _remove_left_over(parent: Path) -> None:
    """Remove the folders of processes that were killed: gibibytes of weights would stay there."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # A younger one may belong to a process that is about to lock it.
            if time.time() - folder.stat().st_mtime > LOCKED_WITHIN_SECONDS:
                os.close(_lock(folder))
                shutil.rmtree(folder)


def _lock(folder: Path) -> int:
    """Lock the folder and return the descriptor that holds the lock. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def gather(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Takes part in what another rank gathers, and keeps none of it."""
    deque(weights, maxlen=0)


def write_weights(model: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes `folder` with config.json and safetensors. It appears whole or not at all; all is gathered either way.

    dtype: of the weights, as `weights_of` takes it.

    Tied weights come under all of their names: vLLM on a CPU keeps a copy of the output layer, in an order of its own,
    which it makes anew only where that layer's name is among what it reloads.
    """
    dtype = dtype or compute_dtype(model)
    weights = weights_of(model, dtype)
    try:
        _write(weights, model, folder, dtype)
    finally:
        gather(weights)  # else the other ranks would wait for the rest


def _write(weights: Iterable[tuple[str, Tensor]], model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = copy.deepcopy(plain(model).config)
    config.architectures = [type(plain(model)).__name__]
    config.dtype = dtype
    config.save_pretrained(part)
    shard: dict[str, Tensor] = {}
    held = shards = 0
    for name, weight in _under_all_names(weights, model):
        if held and held + weight.nbytes > SHARD_BYTES:
            save_file(shard, part / f"model-{shards:05}.safetensors")
            shard, held, shards = {}, 0, shards + 1
        shard[name] = weight.to("cpu", copy=False).contiguous()
        held += weight.nbytes
        del weight
    save_file(shard, part / f"model-{shards:05}.safetensors")
    part.rename(folder)


def _under_all_names(weights: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights, those that are tied once for each of their names."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            others.setdefault(_plain_name(known), []).append(_plain_name(name))
    for name, weight in weights:
        yield name, weight
        for other in others.get(name, ()):
            yield other, weight.clone()  # safetensors takes no memory twice


def _adapters(layer: Any, weight: Tensor) -> Tensor:
    """The sum that the active adapters of a PEFT layer add to its weight."""
    delta = torch.zeros_like(weight, dtype=torch.float32)  # `weight` may be kept in less
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            delta += whole(layer.get_delta_weight(adapter))
    return delta
