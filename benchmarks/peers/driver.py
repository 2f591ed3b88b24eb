"""Driver of peers that are libraries instead of servers. It steps all environments together for a given time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from time import perf_counter

from benchmarks.machine import Usage
from benchmarks.serving.lake import TASK, WALK
from benchmarks.serving.measure import check, summarise


class Pipes:
    """Standard input and output, hidden from processes that the library starts, because some would use them."""

    def __init__(self) -> None:
        self.commands, self.answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)


def serve_runs(
    pipes: Pipes, sessions: int, reset: Callable[[], None], step: Callable[[str], Sequence[tuple[float, bool]]]
) -> None:
    """Read a number of seconds per line of standard input, step for that long, and print the measurement as JSON.

    Args:
        pipes: source of the commands and destination of the measurements.
        sessions: number of environments.
        reset: resets all environments.
        step: plays an action in all environments; returns a reward for each, and whether its episode ended.
    """
    for line in pipes.commands:
        seconds, waits = float(line), []
        reset()
        before, start = Usage.now(), perf_counter()
        for number, action in cycle(enumerate(WALK, 1)):
            send_time = perf_counter()
            for reward, over in step(action):
                check(number, reward, over)
            reply_time = perf_counter()
            waits.append(reply_time - send_time)
            if reply_time - start >= seconds:
                break
            if number == len(WALK) and not TASK.random:  # else a step of an ended episode resets it
                reset()
        elapsed, usage = reply_time - start, Usage.now() - before
        result = summarise(sessions * len(waits), elapsed, waits)
        print(
            json.dumps(asdict(replace(result, client_cpu=usage.own, server_cpu=usage.descendants, wire=usage.wire))),
            file=pipes.answers,
            flush=True,
        )
