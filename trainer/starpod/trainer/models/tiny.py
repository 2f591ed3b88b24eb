"""A small decoder with random weights, and a tokenizer built from the words of its environments.

Every word, digit, punctuation mark and map symbol is one token. Other text is encoded as bytes, so
`decode(encode(text)) == text` for any text.

A word's token includes the preceding space. A space is added to the text after a special token, and decoding removes
it. A word is therefore the same token after `<answer>` as between two words, and the encoding of a text after a special
token does not depend on what precedes that token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import Unigram
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from starpod.trainer.data.images import MARK
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.vision import ImageLlama, ImageLlamaConfig
from starpod.trainer.prompts.grammar import FURTHER_TAGS, SEPARATOR, TAGS

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template adds one token before each message, and an end token after each message of the policy."""

_SPECIALS = (PAD, END, *ROLES)
_ALWAYS = (SEPARATOR, *"0123456789")
"""Entries of every vocabulary, with and without a preceding space."""

_WORDS = r" ?\|\|| ?\p{Lu}?\p{Ll}+| ?\S|\s"
"""Pattern of a token: the action separator, a word, or any other character. Only the first letter of a word may be a
capital, so a row of a map such as SFFH is no word, and is split into characters."""

_SEVERAL_LETTERS = re.compile(r"[^\W\d_]{2}")
_MOST_WORDS = 200_000
"""Maximum number of words that are searched for phrases, not counting repeated texts. This takes about a second."""

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def train_tokenizer(texts: Iterable[str], *, size: int, phrases: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer with the most frequent words of `texts`.

    Tags of optional blocks and the image mark are tokens if they occur in the texts. The same texts give the same
    tokenizer.

    Args:
        texts: Training texts, read once.
        size: Maximum number of entries.
        phrases: Whether words that always occur together become one token; see TinyConfig.

    Raises:
        ValueError: `size` leaves no room for words.
    """
    splitter = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    sections = re.compile("|".join(map(re.escape, (*_SPECIALS, *TAGS, *FURTHER_TAGS, MARK))))
    counts: Counter[str] = Counter()
    sequences: Counter[tuple[str, ...]] = Counter()
    found_tags: set[str] = set()
    for text in texts:
        found_tags.update(sections.findall(text))
        for section in sections.split(text):
            if section:
                words = tuple(word for word, _ in splitter.pre_tokenize_str(f" {section}"))
                counts.update(words)
                if phrases:
                    sequences[words] += 1
    tags = (*TAGS, *(tag for tag in FURTHER_TAGS if tag in found_tags))
    fixed_words = [" ", "\n", *_ALWAYS, *(f" {word}" for word in _ALWAYS)]
    specials = (*_SPECIALS, *([MARK] if MARK in found_tags else []))
    entries = [*specials, *tags, *_BYTES, *fixed_words]
    if size <= len(entries):
        raise ValueError(f"a vocabulary of {size} has no room for words; give it more than {len(entries)} entries")
    phrase_counts = find_phrases(sequences)
    counts.update(phrase_counts)
    kept_words = sorted(counts.keys() - set(fixed_words), key=lambda word: (-counts[word], word))[: size - len(entries)]
    if known_phrases := phrase_counts.keys() & set(kept_words):
        pattern = "|".join(map(re.escape, sorted(known_phrases, key=lambda phrase: (-len(phrase), phrase))))
        splitter = pre_tokenizers.Split(Regex(rf"(?:{pattern})(?!\p{{L}})|{_WORDS}"), behavior="isolated")
    # With equal scores, Unigram prefers fewer pieces, so a known word is always one token.
    pieces = [(piece, -1.0) for piece in [*entries, *kept_words]]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = splitter
    start_pattern = "|".join(["\\A ", *(f"(?<={re.escape(token)}) " for token in (*specials, *tags))])
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex(start_pattern), "")]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    # Tags are single tokens but part of a reply's text, so decoding must not skip them as special tokens.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tags])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def find_phrases(sequences: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """Return sequences of words in which one word implies its neighbour, with their numbers of occurrences.

    Of "You see: key" and "You see: door", the phrase is "You see:". At least one word of a pair has several letters, so
    that the cells of a map remain separate tokens. Rare pairs are left out: they may imply each other by chance.
    """
    original_words = {word for sequence in sequences for word in sequence}
    ends = accumulate(map(len, sequences))
    counts = {words: sequences[words] for words, end in zip(sequences, ends, strict=True) if end <= _MOST_WORDS}
    cutoff = sum(counts.values()) // 500
    while True:
        words, pairs = Counter[str](), Counter[tuple[str, str]]()
        for sequence, count in counts.items():
            for word in sequence:
                words[word] += count
            for pair in pairwise(sequence):
                pairs[pair] += count
        joined_pairs = {
            pair
            for pair, count in pairs.items()
            if count > cutoff and count in (words[pair[0]], words[pair[1]]) and any(map(_SEVERAL_LETTERS.search, pair))
        }
        if not joined_pairs:
            return {word: count for word, count in words.items() if word not in original_words}
        counts = {_join(sequence, joined_pairs): count for sequence, count in counts.items()}


def _join(sequence: tuple[str, ...], joined: Container[tuple[str, str]]) -> tuple[str, ...]:
    """Return a sequence of words with the pairs in `joined` as one word each."""
    words: list[str] = []
    last_word = ""
    for word in sequence:
        if (last_word, word) in joined:
            words[-1] += word
            last_word = ""  # a word joins one pair at a time
        else:
            words.append(word)
            last_word = word
    return tuple(words)


def build_tiny(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Build a model of Qwen2's architecture with random weights. The global random state is unchanged.

    Its class is Llama with biases, not Qwen2: for a folder of type qwen2, transformers would ignore the saved tokenizer
    and load Qwen's own one.
    """
    shape = tiny_shape(config, len(tokenizer))
    shape.eos_token_id = tokenizer.eos_token_id
    shape._attn_implementation = config.attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tiny_kind(config)(shape)


def tiny_kind(config: ModelConfig) -> type[LlamaForCausalLM]:
    """Return the class of the model: a vision model if images are configured."""
    return ImageLlama if config.tiny.image.rows else LlamaForCausalLM


def tiny_shape(config: ModelConfig, vocabulary: int) -> LlamaConfig:
    """Return the configuration of the model of `build_tiny`, for a tokenizer with `vocabulary` entries."""
    tiny = config.tiny
    config_class: Any = partial(ImageLlamaConfig, image=tiny.image.to_dict()) if tiny.image.rows else LlamaConfig
    shape: LlamaConfig = config_class(
        vocab_size=vocabulary,
        hidden_size=tiny.hidden,
        intermediate_size=tiny.intermediate,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.key_value_heads or tiny.heads,
        max_position_embeddings=tiny.positions,
        rope_parameters={"rope_type": "default", "rope_theta": tiny.rope_theta},
        tie_word_embeddings=tiny.tied,
        # With biases, a query can attend to a distance, independent of the token there.
        attention_bias=True,
        # Narrow models need larger weights: 0.02, as in large models, would leave them almost linear for many steps.
        initializer_range=0.5 * tiny.hidden**-0.5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return shape
