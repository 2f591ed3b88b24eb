"""Turns for tests that ask little of them."""

from collections.abc import Sequence
from typing import Any

from starpod.trainer.data.episode import ActionOutcome, Turn

NOT_DONE = ActionOutcome(executed=False, valid=False, effective=False)


def a_turn(reply: Sequence[int] = (2,), reward: float = 0.0, **values: Any) -> Turn:
    """A turn that sampled these tokens under version 0 with log-probability 0, after a prompt of one token.

    reward: of the environment, where no parts are given.
    """
    sampled = {"logprobs": [0.0] * len(reply), "versions": [0] * len(reply)}
    filled = {"prompt": [1], "fresh": True, "parts": {"environment": reward} if reward else {}, **sampled}
    return Turn(reply=list(reply), **filled | values)
