"""Measurement of the latency that the gateway adds to a reply. The engine only waits, and clients use raw sockets.

    python -m benchmarks.serving.gateway [--sessions 64] [--turns 10] [--engine-seconds 0.25] [--json FILE]

Each session has its own connection and requests a chat completion per turn, with its whole history. The added latency
is the time from request to reply, minus the median time of the same engine called directly by the same number of
coroutines. Gateway and client have one core each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.machine import CLIENT_CORE, SERVER_CORE, Usage, only_on
from benchmarks.results import Columns, cells_of, print_table, write_result
from benchmarks.serving.http import Caller
from tests.support import ROOT, ServerProcess

REPLY_TOKENS = 64
OBSERVATION = "The door is closed, and on the table lies a key. You may go north, take the key or open the door. "

COLUMNS: Columns = {
    "Sessions": lambda row: f"{row['sessions']}",
    "Replies": lambda row: f"{row['replies']}",
    "Longest prompt": lambda row: f"{row['longest_prompt']:,}",
    "p50 added": lambda row: f"{row['p50_ms']:.1f} ms",
    "p90": lambda row: f"{row['p90_ms']:.1f} ms",
    "p99": lambda row: f"{row['p99_ms']:.1f} ms",
    "CPU of a reply": lambda row: f"{row['cpu_ms']:.1f} ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--engine-seconds", type=float, default=0.25)
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/gateway.json")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # given to the gateway's own process
    arguments = parser.parse_args()
    if arguments.port is not None:
        uvloop.run(_serve(arguments.port, arguments.engine_seconds))
        return
    result = uvloop.run(measure(arguments.sessions, arguments.turns, arguments.engine_seconds))
    write_result(arguments.json, result)
    print_table(list(COLUMNS), cells_of([result], COLUMNS))


async def measure(sessions: int, turns: int, engine_seconds: float) -> dict[str, Any]:
    """Play all sessions with the engine alone, then with the gateway. Starts are spread over a reply's time."""
    with only_on(SERVER_CORE):
        command = [sys.executable, "-m", "benchmarks.serving.gateway", "--engine-seconds", str(engine_seconds)]
        server = ServerProcess(command)
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    max_tokens = 0

    async def directly(number: int) -> list[float]:
        waits = []
        for _ in range(turns):
            start = perf_counter()
            await asyncio.sleep(engine_seconds)  # all that the engine does
            waits.append(perf_counter() - start)
        return waits

    async def through_the_gateway(number: int) -> list[float]:
        nonlocal max_tokens
        caller = Caller(*await asyncio.open_connection(host, int(port), limit=2**24), f"session-{number}")
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are in a house."}]
        waits = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn}. {OBSERVATION}"})
            start = perf_counter()
            reply = json.loads(await caller.post("/v1/chat/completions", {"model": "m", "messages": messages}))
            waits.append(perf_counter() - start)
            messages.append(reply["choices"][0]["message"])
            max_tokens = max(max_tokens, reply["usage"]["prompt_tokens"])
        caller.close()
        return waits

    async def play(way: Callable[[int], Awaitable[list[float]]]) -> list[float]:
        async def begin(number: int) -> list[float]:
            await asyncio.sleep(random.Random(number).uniform(0, engine_seconds))
            return await way(number)

        return sorted(chain.from_iterable(await asyncio.gather(*map(begin, range(sessions)))))

    with contextlib.closing(server), only_on(CLIENT_CORE):
        await through_the_gateway(-1)
        baseline = median(await play(directly))
        before = Usage.now()
        waits = await play(through_the_gateway)
        seconds = (Usage.now() - before).descendants
    cuts = [1e3 * (cut - baseline) for cut in quantiles(waits, n=100)]
    return {
        "sessions": sessions,
        "turns": turns,
        "engine_seconds": engine_seconds,
        "replies": len(waits),
        "longest_prompt": max_tokens,
        "p50_ms": round(cuts[49], 3),
        "p90_ms": round(cuts[89], 3),
        "p99_ms": round(cuts[98], 3),
        "cpu_ms": round(1e3 * seconds / len(waits), 3),
    }


async def _serve(port: int, engine_seconds: float) -> None:
    from starpod.gateway.app import create_app
    from starpod.gateway.lineage import ChatLayout
    from starpod.gateway.records import Records
    from starpod.gateway.session import Sampler
    from starpod.serving.http import listening
    from starpod.trainer.agents.config import SamplingConfig
    from starpod.trainer.engines.base import Reply, Request
    from starpod.trainer.prompts.template import Template
    from tests.trainer.chat_templates import tokenizer
    from tests.trainer.scripted_engine import ScriptedEngine

    template = Template(tokenizer("chatml"))
    tokens = template.encode("I take the key and open the door with it. " * 8)
    ids = [*tokens[: REPLY_TOKENS - 1], template.end]

    class Waiting(ScriptedEngine):
        async def generate(self, request: Request) -> Reply:
            await asyncio.sleep(engine_seconds)
            return Reply(ids, [-0.5] * len(ids), [0] * len(ids), "stop")

    sampler = Sampler(
        engine=Waiting(template, lambda request, text: ""),
        layout=ChatLayout(template),
        sampling=SamplingConfig(max_episode_tokens=100_000),
    )
    with tempfile.TemporaryDirectory() as folder:
        async with listening(create_app(Records(sampler, Path(folder)), model="m"), port=port) as url:
            print(url, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    main()
