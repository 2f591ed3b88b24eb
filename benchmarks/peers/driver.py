"""For peers that are no servers but libraries: steps all environments together for as long as it is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from time import perf_counter

from benchmarks.machine import Usage
from benchmarks.serving.lake import WALK
from benchmarks.serving.measure import check, summarise


class Pipes:
    """Standard input and output, taken away from the processes that the library starts: some read and write there."""

    def __init__(self) -> None:
        self.commands, self.answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)


def serve_runs(
    pipes: Pipes, sessions: int, reset: Callable[[], None], step: Callable[[str], Sequence[tuple[float, bool]]]
) -> None:
    """For each line of standard input, a number of seconds, prints one measurement as JSON. reset: all environments.
    step: one action in all of them; the rewards, and whether the episodes are over."""
    for line in pipes.commands:
        seconds, waits = float(line), []
        reset()
        before, start = Usage.now(), perf_counter()
        for place, action in cycle(enumerate(WALK, 1)):
            asked = perf_counter()
            for reward, over in step(action):
                check(place, reward, over)
            answered = perf_counter()
            waits.append(answered - asked)
            if answered - start >= seconds:
                break
            if place == len(WALK):
                reset()
        elapsed, used = answered - start, Usage.now() - before
        result = summarise(sessions * len(waits), elapsed, waits)
        print(
            json.dumps(asdict(replace(result, client_cpu=used.own, server_cpu=used.descendants, wire=used.wire))),
            file=pipes.answers,
            flush=True,
        )
