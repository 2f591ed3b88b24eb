"""Weights of a model in the form that vLLM loads: names and tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from starpod.serving.folders import make_locked_folder
from starpod.trainer.engines.config import VLLM_PREFIX
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.parallel.sharding import reshard, whole

SHARD_BYTES = 4 * 1024**3


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's weights."""
    return next(model.parameters()).device


def weights_of(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint name and the whole, detached tensor of each parameter.

    FSDP shards are gathered one parameter at a time, so every rank has to iterate. PEFT adapters are merged into their
    layer's weight. Tied weights are yielded once, under their first name, as in a checkpoint. A dtype of None is the
    type in which the model computes.
    """
    dtype = dtype or compute_dtype(model)
    reshard(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = whole(parameter)
        layer, separator, _ = name.rpartition(".base_layer.weight")
        if separator:
            weight = weight + _adapters(model.get_submodule(layer), weight)
        weight = weight.to(dtype)
        yield from _as_saved(model, name, weight)
        del weight  # before the next one is gathered


def shapes_of(model: nn.Module) -> Iterator[tuple[str, list[int]]]:
    """Yield the names and shapes of the tensors of `weights_of` without gathering them."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            for saved_name, weight in _as_saved(model, name, torch.empty(parameter.shape, device="meta")):
                yield saved_name, list(weight.shape)


def _as_saved(model: nn.Module, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter's tensors as in a checkpoint, where, for example, each expert of a layer has separate ones."""
    yield from revert_weight_conversion(unwrapped(model), {_plain_name(name): weight}).items()


def _plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def make_folder(parent: str) -> Path:
    """Create a folder for weights in `parent`, with default permissions.

    If `parent` is empty, the folder is temporary and private. Temporary folders that killed processes left are then
    removed, because they contain gibibytes.
    """
    if not parent:
        return make_locked_folder(VLLM_PREFIX, Path(tempfile.gettempdir()))
    folder = Path(parent).resolve() / f"{VLLM_PREFIX}{uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    return folder


def gather(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Take part in gathering weights for another rank and discard them."""
    deque(weights, maxlen=0)


def write_weights(model: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and safetensors to a folder, which appears complete or not at all.

    All weights are gathered even if writing fails. Tied weights are written under all of their names: on a CPU, vLLM
    keeps a reordered copy of the output layer, and renews it only if it reloads a weight with that layer's name.

    Args:
        model: The model, which may be sharded or have LoRA adapters; see `weights_of`.
        dtype: Dtype of the weights; None: the type in which the model computes.
    """
    dtype = dtype or compute_dtype(model)
    weights = weights_of(model, dtype)
    try:
        _write(weights, model, folder, dtype)
    finally:
        gather(weights)  # otherwise the other ranks would hang if writing failed


def _write(weights: Iterable[tuple[str, Tensor]], model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config = copy.deepcopy(unwrapped(model).config)
    config.architectures = [type(unwrapped(model)).__name__]
    config.dtype = dtype
    config.save_pretrained(temporary)
    shard: dict[str, Tensor] = {}
    shard_bytes = shards = 0
    for name, weight in _under_all_names(weights, model):
        if shard_bytes and shard_bytes + weight.nbytes > SHARD_BYTES:
            save_file(shard, temporary / f"model-{shards:05}.safetensors")
            shard, shard_bytes, shards = {}, 0, shards + 1
        shard[name] = weight.to("cpu", copy=False).contiguous()
        shard_bytes += weight.nbytes
        del weight
    save_file(shard, temporary / f"model-{shards:05}.safetensors")
    temporary.rename(folder)


def _under_all_names(weights: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, and tied weights once per name."""
    first_names: dict[int, str] = {}
    other_names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first_name := first_names.setdefault(id(parameter), name)) != name:
            other_names.setdefault(_plain_name(first_name), []).append(_plain_name(name))
    for name, weight in weights:
        yield name, weight
        for other_name in other_names.get(name, ()):
            yield other_name, weight.clone()  # safetensors refuses tensors that share memory


def _adapters(layer: Any, weight: Tensor) -> Tensor:
    """Return the sum of the active PEFT adapters' changes to a layer's weight."""
    delta = torch.zeros_like(weight, dtype=torch.float32)  # `weight` may have a lower precision
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            delta += whole(layer.get_delta_weight(adapter))
    return delta
