"""Steps over HTTP compared with gRPC: one call per step, and a batch of all sessions' steps per request.

    python -m benchmarks.serving.http [--sessions 1,64] [--seconds 2] [--rounds 3] [--json FILE]

The server and this client have one core each. The HTTP client is only a socket and a JSON encoder, so that the figures
depend on the server as much as possible. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.machine import CLIENT_CORE, SERVER_CORE, Usage, only_on
from benchmarks.results import Columns, cells_of, duration, print_table, write_result
from benchmarks.serving.lake import ENVIRONMENT, OPTIONS, TASK, WALK
from benchmarks.serving.measure import Measurement, Run, check, drive, summarise
from benchmarks.serving.ways import open_unary
from starpod.load.processes import tune_garbage_collection
from tests.support import ROOT, ServerProcess

_WARM_UP_SECONDS = 0.3
_UNLIMITED = {"max_turns": 0, "max_actions_per_turn": 0, "max_actions": 0}


class Caller:
    """A connection. key: bearer token to send; empty: none."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = "") -> None:
        self._key = f"authorization: Bearer {key}\r\n" if key else ""
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Send a request, and return the complete body of the response."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{self._key}"
        self._writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        response = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not response.startswith(b"http/1.1 200"):
            raise RuntimeError(response.decode())
        if (index := response.find(b"content-length: ")) >= 0:
            return await self._reader.readexactly(int(response[index + 16 :].split(b"\r\n", 1)[0]))
        chunks = []
        while size := int(await self._reader.readline(), 16):
            chunks.append(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return b"".join(chunks)

    def close(self) -> None:
        self._writer.close()


class Player:
    """A session with its own connection and one request per step."""

    def __init__(self, caller: Caller, session: str, epoch: int) -> None:
        self._caller = caller
        self._path = f"/v1/sessions/{session}"
        self._epoch = epoch
        self._index = 0

    async def step(self, action: str) -> tuple[float, bool]:
        step = {"epoch": self._epoch, "step_index": self._index, "actions": [{"text": action}]}
        transition = json.loads(await self._caller.post(f"{self._path}:step", step))["transition"]
        self._index += 1
        return transition["reward"], transition["terminated"] or transition["truncated"]

    async def reset(self) -> None:
        reply = json.loads(await self._caller.post(f"{self._path}:reset", {"epoch": self._epoch, "seed": 0}))
        self._epoch, self._index = reply["session"]["epoch"], 0


@contextlib.asynccontextmanager
async def _opened(
    url: str, sessions: int, connections: int
) -> AsyncIterator[tuple[list[Caller], list[dict[str, Any]]]]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    callers = [Caller(*await asyncio.open_connection(host, int(port), limit=2**24)) for _ in range(connections)]
    opening = {"environment_id": ENVIRONMENT, "options": OPTIONS, "seed": 0, "count": sessions, "limits": _UNLIMITED}
    session_list = json.loads(await callers[0].post("/v1/sessions:open", opening))["sessions"]
    yield callers, session_list
    await callers[0].post("/v1/sessions:close", {"session_ids": [session["session_id"] for session in session_list]})
    for caller in callers:
        caller.close()


@contextlib.asynccontextmanager
async def open_http(url: str, sessions: int) -> AsyncIterator[Run]:
    """Open sessions that each have a connection and a coroutine, and send one request per step."""
    async with _opened(url, sessions, sessions) as (callers, session_list):
        players = [
            Player(caller, session["session_id"], session["epoch"])
            for caller, session in zip(callers, session_list, strict=True)
        ]
        yield lambda seconds: drive(players, seconds)


@contextlib.asynccontextmanager
async def open_batches(url: str, sessions: int) -> AsyncIterator[Run]:
    """Open sessions that all step with one request, whose replies are server-sent events."""
    async with _opened(url, sessions, 1) as ((caller,), session_list):
        ids = [session["session_id"] for session in session_list]
        epochs = dict.fromkeys(ids, 1)

        async def ask(kind: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
            body = {"calls": [{"call_id": call_id, kind: call} for call_id, call in enumerate(calls)]}
            events = (await caller.post("/v1/sessions:stream", body)).split(b"\n\n")
            replies = [reply for event in events if event for reply in json.loads(event[6:])["replies"]]
            return [reply[kind] for reply in sorted(replies, key=lambda reply: int(reply["call_id"]))]

        async def march(seconds: float) -> Measurement:
            waits: list[float] = []
            start = perf_counter()
            while perf_counter() - start < seconds:
                await ask("reset", [{"session_id": key, "epoch": epochs[key], "seed": 0} for key in ids])
                for key in ids:
                    epochs[key] += 1
                for number, action in enumerate(WALK, 1):
                    before = perf_counter()
                    step = {"step_index": number - 1, "actions": [{"text": action}]}
                    replies = await ask("step", [{"session_id": key, "epoch": epochs[key], **step} for key in ids])
                    waits += [perf_counter() - before] * len(ids)
                    for reply in replies:
                        transition = reply["transition"]
                        check(number, transition["reward"], transition["terminated"])
            return summarise(len(waits), perf_counter() - start, waits)

        yield march


WAYS: dict[str, Callable[[str, int], contextlib.AbstractAsyncContextManager[Run]]] = {
    "gRPC, unary": open_unary,
    "HTTP": open_http,
    "HTTP, batches": open_batches,
}


COLUMNS: Columns = {
    "One lake": lambda row: row["way"],
    "Sessions": lambda row: f"{row['sessions']}",
    "Steps/s": lambda row: f"{row['steps_per_second']:,.0f}",
    "Median wait": lambda row: duration(row["p50_us"] / 1e6),
    "Server's CPU µs per step": lambda row: f"{row['server_cpu_us']:.0f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1,64", help="numbers of sessions, comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/http.json")
    arguments = parser.parse_args()
    tune_garbage_collection()
    counts = [int(count) for count in arguments.sessions.split(",")]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(measure(counts, arguments.seconds, arguments.rounds))
    print_table(list(COLUMNS), cells_of(results, COLUMNS))
    write_result(arguments.json, {"results": results})


async def measure(counts: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measure each way with each number of sessions, in turn in each round. Returns medians over the rounds."""
    results: dict[tuple[str, int], list[Measurement]] = {}
    with only_on(SERVER_CORE):
        server = ServerProcess([sys.executable, "-m", "starpod.cli.main", "serve", *TASK.serve, "--http", "0"])
    url = next(word.rstrip(",") for word in server.ready.split() if word.startswith("http://"))
    with contextlib.closing(server), only_on(CLIENT_CORE):
        for _ in range(rounds):
            for count in counts:
                for name, way in WAYS.items():
                    async with way(server.address if way is open_unary else url, count) as run:
                        await run(_WARM_UP_SECONDS)
                        before = Usage.now()
                        measurement = await run(seconds)
                        usage = Usage.now() - before
                    results.setdefault((name, count), []).append(replace(measurement, server_cpu=usage.descendants))
    return [
        {
            "way": name,
            "sessions": count,
            "steps_per_second": round(median(entry.rate for entry in entries), 1),
            "p50_us": round(1e6 * median(entry.p50 for entry in entries), 1),
            "server_cpu_us": round(1e6 * median(entry.server_cpu / entry.steps for entry in entries), 1),
        }
        for (name, count), entries in results.items()
    ]


if __name__ == "__main__":
    main()
