"""Small vision-language models of transformers with random weights, made here so that nothing is downloaded."""

import io
import random
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from starpod.trainer.data.images import by_key
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import CriticKind, Policy, build_policy
from tests.trainer.chat_templates import tokenizer

KINDS = ("idefics3", "smolvlm")


def noise(seed: int) -> bytes:
    """An image of the size that they see."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (16, 16), random.Random(seed).randbytes(768)).save(buffer, format="PNG")
    return buffer.getvalue()


IMAGES = [noise(seed) for seed in range(3)]
SHOWN = by_key(IMAGES)


def tiny_vlm(kind: str, folder: Path, critic: CriticKind = "none", *, heads: int = 4) -> Policy:
    """A policy that sees 16 x 16 pixels in 4 x 4 tokens. Its folder is written first. heads: of width 32 / heads."""
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer("parts")),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": min(heads, 2),
        "initializer_range": 0.2,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 2,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=tokenizer("parts").convert_tokens_to_ids("<image>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer("parts").save_pretrained(folder)
    return build_policy(ModelConfig(name=str(folder), critic="separate"), texts=None, critic=critic, seed=1)
