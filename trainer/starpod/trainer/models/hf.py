"""Loading of models and tokenizers from the Hugging Face hub, its cache, a folder, or a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from starpod.trainer.models.bundled import source_of
from starpod.trainer.models.config import PACKAGED, TINY, LoraConfig, ModelConfig, ModelError
from starpod.trainer.models.vision import PRETRAINED

HUB_SECONDS = 5.0
"""Time for the hub to answer whether it has a model. Loading itself retries for most of a minute."""


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises ModelError."""
    _check_hub(config)  # not repeated in load_model, which runs later
    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, config)
    if config.chat_template:
        tokenizer.chat_template = config.chat_template
        _try_template(tokenizer)
    if not tokenizer.chat_template:
        raise ModelError(
            f"{config.name} has no chat template: give a file with one as model.chat_template, or choose an "
            "instruction-tuned model"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {config.name} names no end token (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the configured chat template fails on a single user message."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ModelError(
            f"model.chat_template fails{f' in line {line}' * bool(line)}: {type(error).__name__}: {error}"
        ) from None


def load_model(config: ModelConfig, seed: int) -> torch.nn.Module:
    """Load pretrained weights in `base_dtype` and add float32 adapters if they are enabled, initialized by `seed`.

    Raises ModelError.
    """
    if config.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ModelError("model.attention flash_attention_2 needs the package flash-attn: install it, or use sdpa")
    dtype: torch.dtype = getattr(torch, config.base_dtype)
    model_class = _kind(_load(AutoConfig, config))
    # By default, transformers chooses sdpa if the model supports it, otherwise eager.
    attention = None if config.attention == "sdpa" else config.attention
    model: PreTrainedModel = _load(model_class, config, dtype=dtype, attn_implementation=attention)
    return add_adapters(model, config.lora, seed) if config.lora.rank else model


def load_shape(config: ModelConfig) -> PreTrainedModel:
    """Build the model without weights, on the device `meta`. Raises ModelError."""
    _check_hub(config)
    shape = _load(AutoConfig, config)
    with torch.device("meta"):
        model: PreTrainedModel = _kind(shape).from_config(shape)
    return model


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> torch.nn.Module:
    """Return the model with LoRA layers, which are its only trained parameters.

    Args:
        model: Model to adapt. It is changed in place.
        seed: Seed of the first weights. The global random state is unchanged.

    Raises:
        ModelError: The package peft is missing, or the targets do not exist in the model.
    """
    try:
        import peft
    except ModuleNotFoundError:
        hint = "from a clone of the repository: pip install '.[trainer]'"
        raise ModelError(f"model.lora needs the package peft; {hint}") from None
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: torch.nn.Module = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ModelError(f"model.lora.targets {config.targets!r}: {error}") from None
    return adapted


def _kind(shape: PretrainedConfig) -> Any:
    """Return the class of transformers that loads the model, with vision if we support it for this type."""
    return AutoModelForImageTextToText if shape.model_type in PRETRAINED else AutoModelForCausalLM


def _load(factory: Any, config: ModelConfig, **settings: Any) -> Any:
    source = source_of(config.name)
    try:
        return factory.from_pretrained(source, revision=config.revision, **settings)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"cannot load model {config.name!r}: give {', '.join([TINY, *PACKAGED])}, a folder, or a Hugging Face name "
            "that is in the local cache or can be downloaded from here (a gated one needs HF_TOKEN). "
            f"{_first_line(error)}"
        ) from None


def _check_hub(config: ModelConfig) -> None:
    """Raise ModelError at once if the model is neither a folder nor cached and the hub is unreachable.

    Errors from the hub itself, such as for a gated model, are left to loading, which has better messages.
    """
    name = config.name
    if name in PACKAGED or Path(name).exists() or constants.HF_HUB_OFFLINE:
        return
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=config.revision), str):
            return
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, ValueError):
        return
    except Exception as error:  # errors of the HTTP library: no connection, unknown host, timeout
        raise ModelError(
            f"model {name!r} is neither a folder here nor in the local cache, and the hub cannot be reached: "
            f"{_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
