"""Compare formulas in a confined process: the runner of reward math."""

import json
from collections.abc import Callable
from typing import NoReturn

from math_verify import parse, verify


def main(work: bytes, reply: Callable[[bytes], NoReturn]) -> None:
    """Reply `true` if the first formula of a JSON list is equal to a later one, else `false`."""
    answer, *answers = (parse(f"\\boxed{{{formula}}}", parsing_timeout=None) for formula in json.loads(work))
    is_equal = any(verify(right, answer, timeout_seconds=None) for right in answers)
    reply(json.dumps(is_equal).encode())
