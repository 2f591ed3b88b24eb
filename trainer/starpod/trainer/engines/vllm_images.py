"""Images in vLLM: prompts with images that the trainer has already processed, and the files that vLLM needs to start.

vLLM's own processing of prompts is bypassed. It would scale and crop the images again, and it would treat an image
token that the policy sampled as an image.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from starpod.trainer.data.images import Images, PretrainedView, images_within
from starpod.trainer.engines.base import EngineError
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.models.vision import pixels_of, view_of

ARGUMENTS: dict[str, Any] = {
    # vLLM's class for SmolVLM differs only in how it builds prompts from texts, and needs more packages for that.
    "hf_overrides": {"architectures": ["Idefics3ForConditionalGeneration"]},
    # Each prompt is sent with its pixels, so nothing would be looked up.
    "mm_processor_cache_gb": 0,
}
"""Arguments of vLLM for vision models."""


def pretrained_view(model: nn.Module) -> PretrainedView | None:
    """Return the image processing of a model; None for a text model. Raises EngineError for a tiny vision model."""
    view = view_of(model)
    if view is None or isinstance(view, PretrainedView):
        return view
    raise EngineError("vLLM does not know the tiny model that sees images (model.tiny.image): set engine.name to torch")


def write_processor(view: PretrainedView, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer and an image processor to a folder.

    The processor keeps each image as one square of the view's size.

    Args:
        tokenizer: The model's tokenizer, which is not changed.
    """
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    edge = {"longest_edge": view.columns * view.pixels}
    image_processor = Idefics3ImageProcessor(do_image_splitting=False, size=edge, max_image_size=edge)
    # The processor adds tokens to its tokenizer, so give it a copy.
    processor: Any = Idefics3Processor(image_processor, copy.deepcopy(tokenizer), image_seq_len=view.tokens)
    processor.save_pretrained(folder)


def image_prompt(prompt: list[int], images: Images, model: nn.Module, salt: str) -> dict[str, Any]:
    """Return a prompt with images in the form that vLLM's own processing produces.

    Args:
        prompt: Token ids; ids below 0 refer to images.
        salt: Name of the weights. Caches of prompts and images are only shared between prompts with the same salt.

    Raises:
        ValueError: An image is missing, or the model is a text model.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    view = view_of(model)
    if view is None:
        raise ValueError("the prompt has images, but the model has no image input")
    places = images_within(prompt, view.tokens)
    if missing_keys := {key for _, key in places} - images.keys():
        raise ValueError(f"the prompt names images that were not given with it: keys {sorted(missing_keys)}")
    pixels_N3HW = torch.stack([pixels_of(images[key]) for _, key in places])
    fields = {
        "pixel_values": pixels_N3HW,
        "pixel_attention_mask": torch.ones_like(pixels_N3HW[:, 0], dtype=torch.bool),
        "num_patches": torch.ones(len(places), dtype=torch.long),
    }
    kinds = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=name == "num_patches") for name in fields}
    image_token = unwrapped(model).config.image_token_id
    return {
        "type": "multimodal",
        "prompt_token_ids": [image_token if token < 0 else token for token in prompt],
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(fields, kinds),
        "mm_hashes": {"image": [f"{salt}-{key}" for _, key in places]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=place, length=view.tokens) for place, _ in places]},
        "cache_salt": salt,
    }
