"""A model and a tokenizer of bytes, made here: what the trainers need of one, and no download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# On a busy machine threads that wait for each other make a step of milliseconds take seconds.
torch.set_num_threads(1)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and Qwen2.5's chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def make_config(tokenizer: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def save_model(path: Path) -> Path:
    """A tiny random model and its tokenizer, as a folder that `from_pretrained` takes."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    Qwen2ForCausalLM(make_config(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Scripted(Qwen2ForCausalLM):
    """Learns as a model does, but says what a script says.

    reply: of the number of the row and the text so far, what to say; the end token is added unless it ends in "…".
    said: the tokens, in the order of the calls, by row.
    """

    reply: Callable[[int, str], str]
    said: dict[str, list[list[int]]]

    @classmethod
    def make(cls, tokenizer: Any, reply: Callable[[int, str], str]) -> Scripted:
        torch.manual_seed(0)
        model = cls(make_config(tokenizer))
        model.tokenizer, model.reply, model.calls = tokenizer, reply, []  # type: ignore[assignment]
        return model

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        replies = []
        for row, ids in enumerate(input_ids):
            text = self.reply(row, self.tokenizer.decode(ids[ids != self.tokenizer.pad_token_id]))
            ids = self.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
            replies.append(ids if text.endswith("…") else [*ids, self.tokenizer.eos_token_id])
        self.calls.append(replies)
        longest = max(map(len, replies))
        padded = [ids + [self.tokenizer.pad_token_id] * (longest - len(ids)) for ids in replies]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)
