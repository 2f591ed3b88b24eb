"""Agents that play through a gateway whose processes are killed at random: gateway, engine, environments, a trainer.

What they leave is compared with what the same agents leave undisturbed.
"""

import asyncio
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from zlib import crc32

import openai

from starpod.client import Fleet, Limits
from starpod.trainer.data.files import read_groups
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policy import build_policy
from tests.support import ROOT, ServerProcess, children_of, held_port
from tests.tools.gateway.test_programs import TOOLS

Result = TypeVar("Result")
LAKE = {"size": 8, "success_rate": 0.7}
ACTIONS = ("Left", "Down", "Right", "Up")
AGENTS = 4
ENVIRONMENTS = ("environments", "more environments")
ROUNDING = 1e-4
"""Tolerance of log-probabilities: a batching engine sums in another order if other requests run at the same time."""


def save_model(folder: Path) -> Path:
    """A folder with a small model of random weights."""
    tiny = TinyConfig(hidden=32, layers=1, heads=2, intermediate=32, vocabulary=330)
    texts = ["Up Down Left Right go on 0 1 2"]
    build_policy(ModelConfig(tiny=tiny), texts=texts, critic="none", seed=1).save(folder)
    return folder


def traces(folder: Path) -> dict[tuple[int, int], Any]:
    """Episodes by group and member, without what the clock says."""
    found = {}
    for group in read_groups(folder):
        for episode in group.episodes:
            values = episode.to_json()
            for turn in values["turns"]:
                del turn["generating"], turn["stepping"]
            found[episode.group, episode.member] = values
    return found


def alike(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal but for the rounding of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.0, abs_tol=ROUNDING)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


# --- what is killed ---------------------------------------------------------------------------------------------------


FORKED = [sys.executable, "-m", "tests.tools.gateway.forked"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def begin(stack: contextlib.ExitStack, *arguments: str) -> ServerProcess:
    """A server of `forked`: it is soon back after a kill of its child."""
    process = ServerProcess([*FORKED, *arguments], ONE_THREAD, stack.enter_context(held_port()))
    stack.callback(process.close)
    return process


def begin_command(stack: contextlib.ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    """A command of `forked`: it is called again when its child is killed."""
    process = subprocess.Popen(
        [*FORKED, *arguments], cwd=ROOT, env=os.environ | ONE_THREAD, start_new_session=True, stdout=subprocess.DEVNULL
    )
    stack.callback(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
    return process


@contextlib.contextmanager
def forked(folder: Path, model: Path, engine: Literal["vllm_remote", "torch"]) -> Iterator[dict[str, ServerProcess]]:
    """A gateway and two servers of environments; and what stands for a vLLM server, where it samples from one."""
    with contextlib.ExitStack() as stack:
        servers = {name: begin(stack, "serve", "frozen_lake-v1") for name in ENVIRONMENTS}
        words = ["gateway", str(model), "--out", str(folder / "gateway"), "--max-tokens", "12", "--engine", engine]
        if engine == "vllm_remote":
            servers["engine"] = begin(stack, "engine", str(model))
            words += ["--url", servers["engine"].address]
        servers["gateway"] = begin(stack, *words)
        yield servers


async def kill(servers: dict[str, ServerProcess], kills: int, turns: Counter[int]) -> Counter[str]:
    """Kills one after the other at random, each after a turn that was played since the last kill."""
    rng = random.Random(1)
    counts: Counter[str] = Counter()
    while counts.total() < kills:
        before = turns.total()
        while turns.total() == before:
            await asyncio.sleep(0.005)
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        name = rng.choice(list(servers))
        counts[name] += kill_child(servers[name])
    return counts


def kill_child(server: ServerProcess | subprocess.Popen[bytes]) -> int:
    """Kills the child of a program of `forked`, where one is there; how many were."""
    children = children_of(server.pid)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return len(children)


# --- who plays --------------------------------------------------------------------------------------------------------


async def ask_until_answered(call: Callable[[], Awaitable[Result]]) -> Result:
    while True:
        try:
            return await call()
        except (openai.APIConnectionError, openai.InternalServerError):
            await asyncio.sleep(0.05)


async def walk(fleet: Fleet, address: str, member: int, number: int, turns: Counter[int]) -> list[tuple[Any, ...]]:
    """An episode on slippery ice, by an agent of OpenAI's client and ours. Counts its turns, returns what it saw."""
    name = f"agent-{member}-{number}"
    seen: list[tuple[Any, ...]] = []
    (lake,) = await fleet.open("frozen_lake-v1", seed=number, options=LAKE, limits=Limits(max_turns=10, max_actions=0))
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=name, max_retries=0, timeout=60) as llm:

        async def control(path: str, **body: Any) -> None:
            await ask_until_answered(lambda: llm.post(f"{address}/sessions{path}", body=body, cast_to=object))

        await control("", name=name, group=number, member=member, seed=number)
        messages: list[Any] = []
        while not lake.done:
            messages.append({"role": "user", "content": lake.observation.text})
            completion = await ask_until_answered(lambda: llm.chat.completions.create(model="m", messages=messages))
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
            action = ACTIONS[crc32(messages[-1]["content"].encode()) % 4]
            step = await lake.step([action])
            seen.append((action, step.observation.text, step.reward, step.end_reason, lake.step_index))
            await control(f"/{name}/reward", value=step.reward - 0.1, key=f"step {lake.step_index}")
            turns[member] += 1
        await control(f"/{name}/end", success=step.success)
    await lake.close()
    return seen


async def walks(
    servers: dict[str, ServerProcess], counts: Sequence[int], over: asyncio.Event, turns: Counter[int]
) -> list[list[list[tuple[Any, ...]]]]:
    """Play at least `episodes` episodes of each member, and more until the event is set."""

    async def play(fleet: Fleet, member: int) -> list[list[tuple[Any, ...]]]:
        played: list[list[tuple[Any, ...]]] = []
        while len(played) < counts[member] or not over.is_set():
            played.append(await walk(fleet, servers["gateway"].address, member, len(played), turns))
        return played

    addresses = [servers[name].address for name in ENVIRONMENTS]
    async with Fleet(addresses, timeout=1.0, grace=0.1, health_seconds=0.2, patience=120.0) as fleet:
        return await asyncio.gather(*(play(fleet, member) for member in range(len(counts))))


async def play_among_kills(
    folder: Path, model: Path, kills: int, engine: Literal["vllm_remote", "torch"]
) -> dict[str, Any]:
    """Play until a number of kills, then as many episodes without. Return counts of episodes, losses, differences."""
    over, turns = asyncio.Event(), Counter[int]()
    with forked(folder / "killed", model, engine) as servers:
        playing = asyncio.create_task(walks(servers, [1] * AGENTS, over, turns))
        counts = await kill(servers, kills, turns)
        over.set()
        killed = await playing
    with forked(folder / "calm", model, engine) as servers:
        calm = await walks(servers, [len(episodes) for episodes in killed], over, Counter())
    left, expected = (traces(folder / name / "gateway" / "episodes") for name in ("killed", "calm"))
    seen = [episode for episodes in killed for episode in episodes]
    undisturbed = [episode for episodes in calm for episode in episodes]
    return {
        "kills": dict(counts),
        "episodes": len(seen),
        "turns": turns.total(),
        "steps_that_differ": sum(one != other for one, other in zip(seen, undisturbed, strict=True)),
        "episodes_lost": len(seen) - len(left),
        "traces_that_differ": sum(not alike(left.get(key), trace) for key, trace in expected.items()),
    }


# --- a training run ---------------------------------------------------------------------------------------------------

AGENT = """
history, actions = [], state["actions"]
while not state["done"]:
    history.append(("user", state["observation"]))
    text = ask(*history)
    history.append(("assistant", text))
    action = actions[len(text) % len(actions)]
    state = call(url + "/step", {"actions": [action], "step_index": state["step_index"]})
"""
TRAINED = (
    *("frozen_lake", "collect.groups=2", "collect.group_size=2", "collect.agent.at_once=1", "prompt.prefill=false"),
    *("environment.options.success_rate=0.7", "warm_start.steps=2", "warm_start.episodes=8"),
    *("checkpoint.every=1", "monitor.screen=plain"),
    *("evaluation.every=0", "evaluation.episodes=1", "evaluation.reference=[]", "evaluation.greedy=false"),
    *("monitor.sinks.tensorboard=false", "stop.minutes=null", "rewards.format_penalty=0"),
)
"""One program at a time, so that requests reach the engine in the same order in each run."""


def kill_training(trainer: subprocess.Popen[bytes], servers: dict[str, ServerProcess], run: Path) -> Counter[str]:
    """Kills environments at random, and the trainer after each iteration, until the run is over."""
    rng, counts, metrics, done = random.Random(1), Counter[str](), run / "metrics.jsonl", 0
    due = time.monotonic() + rng.uniform(0.5, 1.5)
    while trainer.poll() is None:
        time.sleep(0.02)  # an iteration takes a third of a second
        if time.monotonic() > due:
            name = rng.choice(ENVIRONMENTS)
            counts[name] += kill_child(servers[name])
            due = time.monotonic() + rng.uniform(0.5, 1.5)
        now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if now > done and trainer.poll() is None:
            done = now
            counts["trainer"] += kill_child(trainer)
    return counts


def trained_among_kills(folder: Path, iterations: int) -> dict[str, Any]:
    """Trains on the episodes of a program while trainer and environments are killed, and again without a kill.

    The trainer, which holds gateway and engine, is killed once in each iteration, environments all the time.
    """
    program = folder / "agent.py"
    program.write_text(TOOLS + AGENT)
    counts: Counter[str] = Counter()
    runs = {name: folder / name for name in ("killed", "calm")}
    for name, run in runs.items():
        with contextlib.ExitStack() as stack:
            servers = {each: begin(stack, "serve", "frozen_lake-v1") for each in ENVIRONMENTS}
            words = [*TRAINED, f"environment.addresses=[{','.join(each.address for each in servers.values())}]"]
            words += [f"collect.agent.command=[{sys.executable},{program}]", f"stop.iterations={iterations}"]
            trainer = begin_command(stack, "train", *words, "--run-dir", str(run), "--resume-or-start")
            if name == "killed":
                counts = kill_training(trainer, servers, run)
            assert trainer.wait() == 0
    left, expected = (traces(run / "episodes") for run in runs.values())
    return {
        "kills": dict(counts),
        "episodes": len(expected),
        "turns": sum(len(trace["turns"]) for trace in expected.values()),
        "episodes_lost": len(expected.keys() - left.keys()),
        "traces_that_differ": sum(not alike(left.get(key), trace) for key, trace in expected.items()),
    }
