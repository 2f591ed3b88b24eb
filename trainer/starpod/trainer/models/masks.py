"""Structures of replies as masks of the tokens that may follow, compiled by the package xgrammar.

Engines sample under the masks of a structure (data/structure.py), and agents record it with the turn. The trainer
replays the reply to score it under the same masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.data.structure import MISSING, part

REFUSED = -1e9
"""Logit of a token that may not follow. Its probability is exactly 0, but unlike -inf it keeps entropies finite."""
_CACHE_BYTES = 1 << 28
"""Maximum memory of compiled structures."""


class TokenMasks:
    """Compiler of structures for one vocabulary. It may be used by several threads.

    Args:
        tokenizer: Tokenizer of the policy.
        vocabulary: Number of logits per token.

    Raises ValueError if the package xgrammar is missing or does not support the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(f"{MISSING} ({error})") from None
        self._xgrammar = xgrammar
        self._words = xgrammar.get_bitmask_shape(1, vocabulary)[1]
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=_CACHE_BYTES)

    def __deepcopy__(self, memo: object) -> TokenMasks:
        return self

    def matcher(self, structure: str) -> Any:
        """Return an xgrammar.GrammarMatcher at the beginning of a reply. Raise ValueError for an invalid structure."""
        tag, stop = part(structure)
        try:
            compiled = self._compiler.compile_structural_tag(tag)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"xgrammar refuses the structure of the reply: {error}") from None
        return self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop)

    def fill(self, matchers: Sequence[Any]) -> Tensor:
        """Return the masks of the next tokens as bits: [matchers, words], int32. Without a matcher, all may follow."""
        bits_NW = torch.full((len(matchers), self._words), -1, dtype=torch.int32)
        for row, matcher in enumerate(matchers):
            if matcher is not None:
                matcher.fill_next_token_bitmask(bits_NW, row)
        return bits_NW

    def replay(self, structure: str, reply: Sequence[int]) -> Tensor:
        """Return the masks under which a reply was sampled as bits: [tokens, words], int32.

        Raises ValueError if the structure does not allow the reply.
        """
        matcher = self.matcher(structure)
        bits_NW = self.fill([None] * len(reply))
        for row, token in enumerate(reply):
            matcher.fill_next_token_bitmask(bits_NW, row)
            accept(matcher, token)
        return bits_NW


def accept(matcher: Any, token: int) -> None:
    """Advance a matcher. Raises ValueError if the token may not follow."""
    if not matcher.accept_token(token):
        raise ValueError(
            f"a reply has the token {token} where its structure allows others: install the same version of xgrammar "
            "for sampling and training, and check that the tokenizer can write the structure"
        )


def masked(logits_NV: Tensor, bits_NW: Tensor) -> Tensor:
    """Return logits with REFUSED where the mask has no bit."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits_NV.device)
    allowed_NV = (bits_NW.to(logits_NV.device).unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits_NV.shape[1]]
    return logits_NV.masked_fill(allowed_NV == 0, REFUSED)
