"""Images in vLLM: prompts whose images the trainer has scaled and placed, and the files that vLLM starts with.

vLLM's own processing of prompts is left out: it would scale and cut images anew, and take a mark of an image that was
sampled as a word for one.
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
from starpod.trainer.models.trunk import plain
from starpod.trainer.models.vision import pixels_of, view_of

ARGUMENTS: dict[str, Any] = {
    # It makes an image to see how much memory one takes, and the text with it.
    "skip_tokenizer_init": False,
    # Its class for SmolVLM differs from this one in how it makes prompts of texts, for which it needs more packages.
    "hf_overrides": {"architectures": ["Idefics3ForConditionalGeneration"]},
    # Nothing is looked up there: pixels travel with each prompt.
    "mm_processor_cache_gb": 0,
}
"""Of an engine whose model has eyes."""


def pretrained_view(model: nn.Module) -> PretrainedView | None:
    """How a model sees images; None where it has no eyes. Raises EngineError for a tiny one with eyes."""
    view = view_of(model)
    if view is None or isinstance(view, PretrainedView):
        return view
    raise EngineError("vLLM does not know the tiny model that sees images (model.tiny.image): set engine.name to torch")


def write_processor(view: PretrainedView, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Adds to a model's folder its tokenizer, and that an image is one square of the view's size, not cut."""
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    edge = {"longest_edge": view.columns * view.pixels}
    image_processor = Idefics3ImageProcessor(do_image_splitting=False, size=edge, max_image_size=edge)
    # Of a copy, because tokens that no prompt holds are added to it.
    processor: Any = Idefics3Processor(image_processor, copy.deepcopy(tokenizer), image_seq_len=view.tokens)
    processor.save_pretrained(folder)


def image_prompt(prompt: list[int], images: Images, model: nn.Module, salt: str) -> dict[str, Any]:
    """A prompt with images, as vLLM's own processing would leave it. Raises ValueError for images that are missing.

    salt: keeps what is computed of prompt and images apart from that of other weights.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    view = view_of(model)
    if view is None:
        raise ValueError("the prompt holds images, and the model has no eyes")
    places = images_within(prompt, view.tokens)
    if missing := {key for _, key in places} - images.keys():
        raise ValueError(f"the prompt names images that were not given with it: keys {sorted(missing)}")
    pixels_N3HW = torch.stack([pixels_of(images[key]) for _, key in places])
    fields = {
        "pixel_values": pixels_N3HW,
        "pixel_attention_mask": torch.ones_like(pixels_N3HW[:, 0], dtype=torch.bool),
        "num_patches": torch.ones(len(places), dtype=torch.long),
    }
    kinds = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=name == "num_patches") for name in fields}
    mark = plain(model).config.image_token_id
    return {
        "type": "multimodal",
        "prompt_token_ids": [mark if each < 0 else each for each in prompt],
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(fields, kinds),
        "mm_hashes": {"image": [f"{salt}-{key}" for _, key in places]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=place, length=view.tokens) for place, _ in places]},
        "cache_salt": salt,
    }
