"""Small tokenizers with the chat templates that matter, made here so that nothing is downloaded."""

import functools
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from starpod.trainer.models.tiny import train_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A header per message, content trimmed, a begin-of-text token, and another end of text than end of turn.
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Drops the reasoning of every reply before the last question.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# No system role, strict alternation, the assistant is called otherwise.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Opens the reasoning itself.
REASONER = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
# Puts the system text into the last question, so that it wanders.
WANDERING = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{{ bos_token }}{% for m in turns %}"
    "{% if m.role == 'user' %}{{ '[INST]' + (system if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
# Templates of vision models: messages in parts, roles in words, and a blank before past replies only.
PARTS = (
    "{{ '<s>' }}{% for m in messages %}{{ m.role | capitalize + (':' if m.content[0].type == 'image' else ': ') }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "reasoner": REASONER,
    "wandering": WANDERING,
    "parts": PARTS,
    "sentencepiece": CHATML.replace("\\n", "").replace("<|im_end|>", "</s>"),  # with byte fallback
    "tiny": "",  # the template of tiny policies, with their own tokenizer
}

PUBLISHED = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
"""Templates of models, whole or shortened."""

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<image>", "<fake_token_around_image>", "<global-img>"),
]

_WRITTEN = re.compile(r"<\|\w+\|>|</?(?:think|tool_call|tool_response|tools)>|\[/?[A-Z_]+\]")


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, some pairs merged, so that the same text can be written in several ways."""
    if template == "tiny":
        return train_tokenizer(["P 1 3 G 0 0 Up Left", "go Down", "O__P\nG___"], size=400)
    if template == "sentencepiece":
        return _sentencepiece()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "i"), ("a", "n"), ("an", "s"), ("U", "p"), ("Ċ", "Ċ"), ("|", "|"), ("Ġ", "|")]
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, bos_token="<s>", eos_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATES.get(template) or PUBLISHED[template]
    for token in sorted(set(_WRITTEN.findall(made.chat_template)) if template in PUBLISHED else ()):
        made.add_tokens([AddedToken(token, special=token[1] == "|", normalized=False)])  # Qwen's tags are not special
    return made


def _sentencepiece() -> PreTrainedTokenizerFast:
    """Characters as tokens, others in bytes, and a blank before a text, as in Llama 2, Mistral and Phi-3."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "▁U", "▁Up"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "U"), ("▁U", "p")], byte_fallback=True, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", *SPECIAL)])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATES["sentencepiece"]
    return made
