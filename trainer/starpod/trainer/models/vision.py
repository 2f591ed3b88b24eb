"""Vision models: negative ids are patches of images, embedded by an encoder that is trained with the model.

A tiny model gets a new encoder. Pretrained vision models have their own and are made to read the same ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from starpod.trainer.data.images import INDEX_BITS, ImageConfig, Images, PretrainedView, read_image
from starpod.trainer.models.trunk import trunk_of, unwrapped

PRETRAINED = ("idefics3", "smolvlm")
"""Supported types of pretrained vision models. Their text models use plain positions."""

_SHOWN: ContextVar[Images] = ContextVar("shown")

_ROWS = 32
"""Patches are encoded in multiples of this, so that a patch's embedding never depends on the other patches."""


@contextmanager
def showing(images: Images) -> Iterator[None]:
    """Provide the images of negative ids to models inside the context."""
    token = _SHOWN.set(images)
    try:
        yield
    finally:
        _SHOWN.reset(token)


@functools.lru_cache(maxsize=4096)
def patches(image: bytes, pixels: int) -> Tensor:
    """Split an image, whose edges are multiples of `pixels`, into uint8 patches [patches, pixels * pixels * 3]."""
    values = torch.from_numpy(np.array(read_image(image)))
    rows, columns = values.shape[0] // pixels, values.shape[1] // pixels
    return values.view(rows, pixels, columns, pixels, 3).transpose(1, 2).reshape(rows * columns, -1)


class ImageEmbedding(nn.Embedding):
    """Embedding of tokens and patches. A patch is embedded as an MLP of its pixels plus a learned position.

    Raises ValueError if `showing` does not provide an image.
    """

    def __init__(self, tokens: int, hidden: int, image: ImageConfig) -> None:
        super().__init__(tokens, hidden)
        self.image = image
        self.encoder = nn.Sequential(
            nn.Linear(3 * image.pixels**2, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)
        )
        self.places = nn.Embedding(image.tokens, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return _with_images(ids, super().forward(ids.clamp(min=0)), self._embed)

    def _embed(self, images: list[bytes], images_N: Tensor, index_N: Tensor) -> Tensor:
        pixels_MPD = torch.stack([patches(image, self.image.pixels) for image in images])
        device = self.weight.device
        pixels_ND = pixels_MPD.to(device)[images_N, index_N].to(self.weight.dtype) / 127.5 - 1
        rows = -len(pixels_ND) % _ROWS
        encoded_NH: Tensor = self.encoder(nn.functional.pad(pixels_ND, (0, 0, 0, rows)))[: len(pixels_ND)]
        states_NH: Tensor = encoded_NH + self.places(index_N)
        return states_NH


def _with_images(ids: Tensor, states: Tensor, embed: Callable[[list[bytes], Tensor, Tensor], Tensor]) -> Tensor:
    """Replace the states of negative ids by embeddings of patches. Raises ValueError for images not in `showing`.

    `embed` returns the embeddings [N, hidden] of N patches. Its arguments are images, each patch's index into these
    images, and each patch's index within its image.
    """
    mask = ids < 0
    if not mask.any():
        return states
    unique_N, inverse = torch.unique(ids[mask], return_inverse=True)
    codes_N = ~unique_N
    keys_M, images_N = torch.unique(codes_N >> INDEX_BITS, return_inverse=True)
    shown_images = _SHOWN.get({})
    try:
        images = [shown_images[key] for key in keys_M.tolist()]
    except KeyError as error:
        raise ValueError(f"ids name an image that was not given with them: key {error}") from None
    embedded_NH = embed(images, images_N, codes_N & ((1 << INDEX_BITS) - 1))
    return states.masked_scatter(mask.unsqueeze(-1), embedded_NH[inverse].to(states.dtype))


# --- pretrained models ------------------------------------------------------------------------------------------------


def open_eyes(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a pretrained vision model of a supported type read negative ids. Other models are unchanged.

    Images are scaled to the square size of the model's encoder and not split.
    """
    config: PretrainedConfig = unwrapped(model).config
    if config.model_type not in PRETRAINED:
        return
    vision: Any = config.vision_config
    pixels = vision.patch_size * config.scale_factor
    rows = vision.image_size // pixels
    token: Any = tokenizer.convert_ids_to_tokens(config.image_token_id)
    marker = "<fake_token_around_image>"
    layout = f"{marker}<global-img>{token}{marker}"
    unwrapped(model).view = PretrainedView(rows=rows, columns=rows, pixels=pixels, token=token, layout=layout)
    trunk_of(model).register_forward_pre_hook(_read_images, with_kwargs=True)


def _read_images(trunk: Any, arguments: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Embed a trunk's input ids if some of them refer to images."""
    ids = values.get("input_ids")
    if ids is None or not (ids < 0).any():
        return None

    def embed(images: list[bytes], images_N: Tensor, index_N: Tensor) -> Tensor:
        # Encode images one by one, so that the other images do not change a single bit of an embedding.
        return torch.stack([_features(trunk, image) for image in images])[images_N, index_N]

    states = _with_images(ids, trunk.get_input_embeddings()(ids.clamp(min=0)), embed)
    return arguments, {**values, "input_ids": None, "inputs_embeds": states}


def _features(trunk: Any, image: bytes) -> Tensor:
    """Return the features [tokens, hidden] of an image."""
    pixels_CHW = pixels_of(image, next(trunk.parameters()).device)
    features: Tensor = trunk.get_image_features(pixels_CHW[None, None], return_dict=True).pooler_output[0]
    return features


def pixels_of(image: bytes, device: torch.device | None = None) -> Tensor:
    """Return an image as [3, height, width] in [-1, 1], the input of pretrained encoders."""
    pixels_HWC = torch.from_numpy(np.array(read_image(image))).to(device)
    return pixels_HWC.permute(2, 0, 1).to(torch.float32) / 127.5 - 1


# --- a model of our own -----------------------------------------------------------------------------------------------


class ImageLlamaConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """Configuration of ImageLlama, with an ImageConfig as a dictionary."""

    model_type = "starpod_image_llama"

    def __init__(self, image: dict[str, Any] | None = None, **values: Any) -> None:
        super().__init__(**values)
        self.image = image


class ImageLlama(LlamaForCausalLM):
    """Llama with an ImageEmbedding."""

    config_class = ImageLlamaConfig

    def __init__(self, config: ImageLlamaConfig) -> None:
        super().__init__(config)
        self.view = ImageConfig.model_validate(config.image)
        self.model.embed_tokens = ImageEmbedding(config.vocab_size, config.hidden_size, self.view)
        self.post_init()  # type: ignore[no-untyped-call]


def view_of(model: nn.Module) -> ImageConfig | None:
    """Return the image processing of a model; None for a text model."""
    view: ImageConfig | None = getattr(unwrapped(model), "view", None)
    return view


AutoConfig.register("starpod_image_llama", ImageLlamaConfig)
AutoModelForCausalLM.register(ImageLlamaConfig, ImageLlama)
