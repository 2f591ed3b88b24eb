"""The trained model with its tokenizer and critic, which scores sampled tokens."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from starpod.trainer.data.images import ImageConfig, Images
from starpod.trainer.data.sample import StructuredSpan
from starpod.trainer.models import hf
from starpod.trainer.models.attention import attend_in_blocks
from starpod.trainer.models.config import RUN_TIME, TINY, ModelConfig, ModelError
from starpod.trainer.models.critic import SeparateCritic, SharedCritic
from starpod.trainer.models.folding import Layout, folds_cleanly, lay_out, lay_out_plainly, tokens_read
from starpod.trainer.models.logprobs import token_logprobs
from starpod.trainer.models.masks import TokenMasks
from starpod.trainer.models.precision import (
    compute_dtype,
    compute_in,
    computing,
    linear_head,
    output_layer,
    round_weights,
)
from starpod.trainer.models.tiny import build_tiny, tiny_kind, tiny_shape, train_tokenizer
from starpod.trainer.models.trunk import splits_cleanly, trunk_of, unwrapped
from starpod.trainer.models.vision import open_eyes, showing, view_of

CriticKind = Literal["none", "shared", "separate"]

_CRITIC = "critic.safetensors"
VALUES = "starpod.json"
"""File of a saved policy with what transformers does not save."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of N sampled tokens in row-major order, float32."""

    logprobs_N: Tensor
    """Log-probabilities in nats."""
    entropy_N: Tensor | None
    """Entropies of the distributions that the tokens were sampled from, in nats."""
    values_N: Tensor | None
    """The critic's values of the contexts before the tokens; [N, heads] if the critic has several heads."""


class Policy(nn.Module):
    """A causal LM of transformers (wrapped in adapters if enabled), its tokenizer, and an optional critic.

    The critic gives `heads` values per context.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        critic: CriticKind,
        heads: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.critic_kind = critic
        self.heads = heads
        self._masks: TokenMasks | None = None
        self.critic = _build_critic(config, model, critic, heads)
        modules = (model, self.critic.trunk) if isinstance(self.critic, SeparateCritic) else (model,)
        for module in modules:
            if config.gradient_checkpointing:
                _recompute_activations(unwrapped(module))
            if (dtype := getattr(torch, config.dtype)) != torch.float32:
                compute_in(module, dtype, float32_logits=config.float32_logits)
        # Dropout is never used, so that training and sampling use the same distribution.
        self.eval()
        self.folds = folds_cleanly(model)
        if self.folds:
            for module in modules:
                attend_in_blocks(module)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocabulary(self) -> int:
        """Size of the output layer. It is at least the size of the tokenizer's vocabulary."""
        return int(unwrapped(self.model).config.get_text_config().vocab_size)

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return int(unwrapped(self.model).config.get_text_config().hidden_size)

    @property
    def view(self) -> ImageConfig | None:
        """Image processing of a vision model; None for a text model."""
        return view_of(self.model)

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Return the trained parameters that belong only to the critic."""
        parameters = iter(()) if self.critic is None else self.critic.parameters()
        return (parameter for parameter in parameters if parameter.requires_grad)

    def frozen(self) -> frozenset[str]:
        """Return the entries of the state dict that adapters leave unchanged; empty without adapters."""
        if unwrapped(self.model) is self.model:
            return frozenset()
        parameters = self.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in parameters if not parameter.requires_grad)

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Return the trained parameters of the language model."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def tokens_read(self, samples: Sequence[list[int]]) -> int:
        """Return the number of tokens that `score` reads, with padding. A common prefix counts once if it is folded."""
        if self.folds:
            return tokens_read(samples, width=self.width)
        return len(samples) * max(map(len, samples))

    def score(
        self,
        tokens_BL: Tensor,
        lengths_B: Tensor,
        sampled_BL: Tensor,
        images: Images | None = None,
        structures: Sequence[Sequence[StructuredSpan]] = (),
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        values: bool = False,
    ) -> Scores:
        """Score the sampled tokens of sequences. Common prefixes are computed once if that saves time (see folding.py).

        Args:
            tokens_BL: Token ids, right-padded.
            lengths_B: Number of tokens of each sequence. Tokens after it are never read.
            sampled_BL: True for the tokens to score.
            images: Images that negative ids refer to.
            structures: For each sequence, the replies that were sampled under a structure; empty: none.
            temperature: Divisor of the logits.

        Raises:
            ValueError: If a first token is to be scored, or if values are requested without a critic.
        """
        if sampled_BL[:, 0].any():
            raise ValueError("the first token of a sequence has no context to be sampled from")
        max_length = int(lengths_B.max())
        sampled_BL = sampled_BL[:, 1:max_length]
        targets_N = tokens_BL[:, 1:max_length][sampled_BL]
        bits_NW = self._masks_of(tokens_BL[:, :max_length], sampled_BL, structures) if any(structures) else None
        # The last token of a sequence is only a target, not an input.
        inputs_BL = tokens_BL[:, : max_length - 1]
        layout = (
            lay_out(inputs_BL, (lengths_B - 1).clamp(max=max_length - 1), width=self.width)
            if self.folds
            else lay_out_plainly(inputs_BL)
        )
        places_N = layout.places_BT[sampled_BL]
        with computing(self.model):
            with self._checkpointing(), showing(images or {}):
                hidden_NH = layout.read(trunk_of(self.model)).index_select(0, places_N)
                values_N = self._values(hidden_NH, layout, places_N) if values else None
            logprobs_N, entropy_N = token_logprobs(
                output_layer(self.model),
                hidden_NH,
                targets_N,
                linear=linear_head(self.model),
                temperature=temperature,
                entropy=entropy,
                logits_at_once=self.config.logits_at_once,
                vocabulary=self.vocabulary,
                bits_NW=bits_NW,
            )
        return Scores(logprobs_N, entropy_N, values_N)

    def save(self, folder: Path, *, rounded: bool = False) -> None:
        """Write a folder that transformers can load, with merged adapters, and a separate file for the critic.

        If `rounded`, weights are rounded to the type in which the model computes; otherwise they are float32.
        """
        model = unwrapped(self.model)
        if model is not self.model:
            adapted: Any = copy.deepcopy(self.model)
            model = adapted.merge_and_unload()
        if rounded and compute_dtype(model) != model.dtype:
            model = copy.deepcopy(model)
            round_weights(model)
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.critic is not None:
            save_file(self.critic.state_dict(), folder / _CRITIC)
        values = {"config": self.config.to_dict(), "critic": self.critic_kind, "heads": self.heads}
        (folder / VALUES).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def _masks_of(
        self, tokens_BL: Tensor, sampled_BL: Tensor, structures: Sequence[Sequence[StructuredSpan]]
    ) -> Tensor:
        """Return the masks of the sampled tokens, in row-major order. `sampled_BL` begins with the second token."""
        self._masks = self._masks or TokenMasks(self.tokenizer, self.vocabulary)
        rows = []
        for tokens, sampled, spans in zip(tokens_BL.tolist(), sampled_BL.cpu(), structures, strict=True):
            bits_LW = self._masks.fill([None] * len(tokens))
            for begin, end, structure in spans:
                bits_LW[begin:end] = self._masks.replay(structure, tokens[begin:end])
            rows.append(bits_LW[1:][sampled])
        return torch.cat(rows)

    def _values(self, hidden_NH: Tensor, layout: Layout, places_N: Tensor) -> Tensor:
        if self.critic is None:
            raise ValueError("this policy has no critic to give values")
        values_N: Tensor = (
            self.critic(hidden_NH) if isinstance(self.critic, SharedCritic) else self.critic(layout, places_N)
        )
        return values_N

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Put layers in training mode for scoring, because transformers recomputes activations only in that mode."""
        layers: list[Any] = []
        if self.config.gradient_checkpointing and torch.is_grad_enabled():
            layers = _recomputed_layers(self)
        try:
            for layer in layers:
                layer.training = True
            yield
        finally:
            for layer in layers:
                layer.training = False


def build_policy(
    config: ModelConfig, *, texts: Iterable[str] | None, critic: CriticKind, seed: int, heads: int = 1
) -> Policy:
    """Build a policy for training. The same arguments give the same weights.

    Args:
        texts: Training texts for the tokenizer of a tiny model; other models ignore them.
        seed: Seed of all weights that are not loaded.
        heads: Number of values that the critic gives per context.

    Raises:
        ModelError: The model cannot be loaded or built.
    """
    model: nn.Module
    if config.name == TINY:
        if texts is None:
            raise ModelError("a tiny model needs texts of its environments, of which its tokenizer is made")
        tokenizer: PreTrainedTokenizerBase = train_tokenizer(
            texts, size=config.tiny.vocabulary, phrases=config.tiny.phrases
        )
        model = build_tiny(config, tokenizer, seed)
    else:
        tokenizer = hf.load_tokenizer(config)
        model = hf.load_model(config, seed)
        open_eyes(model, tokenizer)
        if not splits_cleanly(model):
            raise ModelError(
                f"{config.name} scales or caps its logits, which scoring does not do: choose another model"
            )
    return Policy(config, model, tokenizer, critic, heads)


def build_shape(config: ModelConfig) -> nn.Module:
    """Build the language model and its adapters without weights, on the device `meta`. Raises ModelError."""
    if config.name == TINY:
        with torch.device("meta"):
            return tiny_kind(config)(tiny_shape(config, config.tiny.vocabulary))
    model = hf.load_shape(config)
    with torch.device("meta"):
        return hf.add_adapters(model, config.lora, 0) if config.lora.rank else model


def load_policy(folder: Path, run_config: ModelConfig | None = None) -> Policy:
    """Load a folder written by `Policy.save`, or one with any model of transformers (then without a critic).

    The RUN_TIME keys of `run_config` replace the saved keys. Raises ModelError.
    """
    config, critic, heads = ModelConfig(name=str(folder)), "none", 1
    if (folder / VALUES).exists():
        values = json.loads((folder / VALUES).read_text(encoding="utf-8"))
        # The folder holds complete weights with merged adapters.
        saved_values = values["config"] | {"name": str(folder), "lora": {}, "base_dtype": "float32", "revision": "main"}
        config = ModelConfig.model_validate(
            saved_values | {key: getattr(run_config, key) for key in RUN_TIME if run_config}
        )
        critic, heads = values["critic"], values.get("heads", 1)
    policy = build_policy(config, texts=None, critic=cast(CriticKind, critic), seed=0, heads=heads)
    if policy.critic is not None:
        policy.critic.load_state_dict(load_file(folder / _CRITIC))
    return policy


def _recompute_activations(model: Any) -> None:
    # Newer versions of transformers have renamed the method.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in _recomputed_layers(model):
        layer._gradient_checkpointing_func = functools.partial(_checkpoint_without_dropout, layer)


def _recomputed_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _checkpoint_without_dropout(layer: nn.Module, run: Callable[..., Any], *inputs: Any) -> Any:
    """Call `run`, a layer's forward method, with gradient checkpointing, both times in evaluation mode."""

    def evaluate(*inputs: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            return run(*inputs)
        finally:
            layer.training = before

    return checkpoint(evaluate, *inputs, use_reentrant=False)


def _build_critic(
    config: ModelConfig, model: nn.Module, kind: CriticKind, heads: int
) -> SharedCritic | SeparateCritic | None:
    if kind == "none":
        return None
    width = unwrapped(model).config.get_text_config().hidden_size
    if kind == "shared":
        return SharedCritic(width, config.detach_critic, heads)
    # The critic starts as a copy of the policy, whose features also help to predict values.
    return SeparateCritic(copy.deepcopy(trunk_of(model)), width, heads)
