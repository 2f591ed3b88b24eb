"""The formats of tool calls by name, and the choice of one from a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from starpod.trainer.prompts.formats.base import CallFormat
from starpod.trainer.prompts.formats.harmony import Harmony
from starpod.trainer.prompts.formats.headed import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL
from starpod.trainer.prompts.formats.objects import Hermes, LlamaJson, LlamaPythonic
from starpod.trainer.prompts.formats.tags import Glm, Qwen3Coder

_HERMES = Hermes()
_IN_ORDER = (Harmony(), KIMI_K2, DEEPSEEK_V3, DEEPSEEK_V31, Glm(), Qwen3Coder(), MISTRAL, LlamaPythonic(), LlamaJson())
"""Formats in the order in which their signs are looked for, because DeepSeek V3 shows those of V3.1, too."""

FORMATS: Mapping[str, CallFormat] = {form.name: form for form in (_HERMES, *_IN_ORDER)}


def find_format(chat_template: object) -> CallFormat:
    """Return the format whose signs a chat template shows; Hermes if it shows none."""
    text = str(chat_template)
    return next((form for form in _IN_ORDER if all(sign in text for sign in form.signs)), _HERMES)
