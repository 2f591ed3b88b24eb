"""Turns for tests that ask little of them."""

from collections.abc import Sequence
from typing import Any

from starpod.trainer.data.episode import Turn


def a_turn(reply: Sequence[int] = (2,), **values: Any) -> Turn:
    """A turn that sampled these tokens under version 0 with log-probability 0, after a prompt of one token."""
    filled = {"prompt": [1], "fresh": True, "logprobs": [0.0] * len(reply), "versions": [0] * len(reply)}
    return Turn(reply=list(reply), **filled | values)
