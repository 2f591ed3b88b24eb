"""A tiny decoder with eyes: ids below 0 are patches of images, embedded by an encoder that is trained with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from starpod.trainer.data.images import INDEX_BITS, ImageConfig, Images, read_image
from starpod.trainer.models.trunk import plain

_SHOWN: ContextVar[Images] = ContextVar("shown")

_ROWS = 32
"""Patches are encoded in multiples of this, so that no other patch changes the bits of one's embedding."""


@contextmanager
def showing(images: Images) -> Iterator[None]:
    """A context in which models find the images of the ids that they read."""
    token = _SHOWN.set(images)
    try:
        yield
    finally:
        _SHOWN.reset(token)


@functools.lru_cache(maxsize=4096)
def patches(image: bytes, pixels: int) -> Tensor:
    """uint8 [patches, pixels * pixels * 3] of an image whose edges are multiples of `pixels`, row by row."""
    values = torch.from_numpy(np.array(read_image(image)))
    rows, columns = values.shape[0] // pixels, values.shape[1] // pixels
    return values.view(rows, pixels, columns, pixels, 3).transpose(1, 2).reshape(rows * columns, -1)


class ImageEmbedding(nn.Embedding):
    """Embeddings of tokens; of patches the sum of what an MLP makes of their pixels and what is learnt of their place.

    Raises ValueError for an image that is not among those of `showing`.
    """

    def __init__(self, tokens: int, hidden: int, image: ImageConfig) -> None:
        super().__init__(tokens, hidden)
        self.image = image
        self.encoder = nn.Sequential(
            nn.Linear(3 * image.pixels**2, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)
        )
        self.places = nn.Embedding(image.tokens, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        states = super().forward(ids.clamp(min=0))
        inside = ids < 0
        if not inside.any():
            return states
        unique_N, places = torch.unique(ids[inside], return_inverse=True)
        embedded_NH = self._embed(unique_N)
        return states.masked_scatter(inside.unsqueeze(-1), embedded_NH[places].to(states.dtype))

    def _embed(self, ids_N: Tensor) -> Tensor:
        """[N, hidden] of distinct ids."""
        named_N = ~ids_N
        keys_M, images_N = torch.unique(named_N >> INDEX_BITS, return_inverse=True)
        index_N = named_N & ((1 << INDEX_BITS) - 1)
        shown = _SHOWN.get({})
        try:
            pixels_MPD = torch.stack([patches(shown[key], self.image.pixels) for key in keys_M.tolist()])
        except KeyError as error:
            raise ValueError(f"ids name an image that was not given with them: key {error}") from None
        device = self.weight.device
        pixels_ND = pixels_MPD.to(device)[images_N, index_N].to(self.weight.dtype) / 127.5 - 1
        rows = -len(pixels_ND) % _ROWS
        encoded_NH: Tensor = self.encoder(nn.functional.pad(pixels_ND, (0, 0, 0, rows)))[: len(pixels_ND)]
        placed_NH: Tensor = encoded_NH + self.places(index_N)
        return placed_NH


class ImageLlamaConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """That of ImageLlama. image: values of an ImageConfig."""

    model_type = "starpod_image_llama"

    def __init__(self, image: dict[str, Any] | None = None, **values: Any) -> None:
        super().__init__(**values)
        self.image = image


class ImageLlama(LlamaForCausalLM):
    """Llama whose embeddings read images."""

    config_class = ImageLlamaConfig

    def __init__(self, config: ImageLlamaConfig) -> None:
        super().__init__(config)
        self.view = ImageConfig.model_validate(config.image)
        self.model.embed_tokens = ImageEmbedding(config.vocab_size, config.hidden_size, self.view)
        self.post_init()  # type: ignore[no-untyped-call]


def view_of(model: nn.Module) -> ImageConfig | None:
    """How a model sees images; None where it has no eyes."""
    view: ImageConfig | None = getattr(plain(model), "view", None)
    return view


AutoConfig.register("starpod_image_llama", ImageLlamaConfig)
AutoModelForCausalLM.register(ImageLlamaConfig, ImageLlama)
