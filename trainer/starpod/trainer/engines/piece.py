"""The result of one call of a server that samples, and the check that it is possible."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from starpod.trainer.engines.base import Request

ROUNDING = 1e-3
"""Rounding may make a log-probability positive by at most this."""
ABORT = "abort"
"""Finish reason of a reply that a pause cut short."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Result of one call of the server: a reply or a part of it."""

    tokens: list[int]
    logprobs: list[float]
    finish: str = ABORT
    """Reason why it ended: "stop", "length" or ABORT."""
    reused: int = 0
    """Number of prompt tokens that were in the cache."""

    def extend(self, part: Piece, request: Request, prompt: list[int]) -> Piece:
        """Return this piece with the next part of its stream after `prompt`. Pass the tokens to `Request.on_tokens`."""
        if request.on_tokens is not None and part.tokens:
            request.on_tokens(len(prompt) - len(request.prompt) + len(self.tokens), part.tokens)
        self.tokens.extend(part.tokens)
        self.logprobs.extend(part.logprobs)
        return replace(self, finish=part.finish or self.finish, reused=self.reused or part.reused)

    def check(self, request: Request, limit: int, vocabulary: int) -> None:
        """Check that this is a possible reply, or a part of one, to a request.

        Args:
            request: The request, whose `stop` ids are used.
            limit: Maximum number of tokens of this piece.

        Raises:
            ValueError: A value or its type is impossible. The message completes "the server answered with".
        """
        tokens, logprobs = self.tokens, self.logprobs
        if not isinstance(tokens, list):
            raise ValueError(f"token ids {_short(tokens)}, which are no list")
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(f"the token id {_short(token)}, which is not among the model's {vocabulary} tokens")
        for logprob in logprobs:
            if type(logprob) not in (int, float) or not -sys.float_info.max <= logprob <= ROUNDING:
                raise ValueError(f"the log-probability {_short(logprob)}, which is not a finite number up to 0")
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(tokens)} tokens")
        if len(tokens) > limit:
            raise ValueError(f"{len(tokens)} tokens, although the request's limit is {limit}")
        if not request.stop.isdisjoint(tokens[:-1]):
            raise ValueError("tokens after a stop token")
        has_stopped = bool(tokens) and tokens[-1] in request.stop
        is_possible = {"stop": has_stopped, "length": len(tokens) == limit, ABORT: True}
        if not isinstance(self.finish, str) or not is_possible.get(self.finish, False):
            ending = "with" if has_stopped else "without"
            raise ValueError(
                f"the finish reason {_short(self.finish)} of {len(tokens)} tokens {ending} a stop token, although the "
                f"request's limit is {limit}"
            )
        if type(self.reused) is not int or self.reused < 0:
            raise ValueError(f"{_short(self.reused)} as its number of cached tokens")


def _short(value: object) -> str:
    return f"{value!r:.60}"
