"""`starpod gateway` as a process: its command line, and what a kill leaves."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import openai
import pytest
import torch
from click.testing import CliRunner

from starpod.client import Fleet, Limits
from starpod.gateway.cli import gateway
from starpod.trainer.data.files import read_groups
from starpod.trainer.models.config import ModelConfig, ModelError, TinyConfig
from starpod.trainer.models.policy import build_policy
from tests.support import ServerProcess, children_of, held_port

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny = TinyConfig(hidden=32, layers=1, heads=2, intermediate=32, vocabulary=330)
    texts = ["Up Down Left Right go on 0 1 2"]
    build_policy(ModelConfig(tiny=tiny), texts=texts, critic="none", seed=1).save(folder)
    return folder


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "starpod.cli.main", "gateway", str(model), "--folder", str(tmp_path / "gateway")]
    process = ServerProcess([*command, "--max-tokens", "12"], {"OMP_NUM_THREADS": "1"})
    yield process
    process.close()


def play(address: str, session: str, turns: int) -> list[Any]:
    """A conversation of an agent that knows nothing but OpenAI's client."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key=session, max_retries=0, timeout=60) as llm:
        messages: list[Any] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"go on {turn}"})
            completion = llm.chat.completions.create(model="m", messages=messages)
            messages.append(completion.choices[0].message.model_dump())
    return messages


def control(address: str, path: str, **body: Any) -> None:
    with openai.OpenAI(base_url=address, api_key="x", max_retries=0) as http:
        http.post(path, body=body, cast_to=object)


def traces(folder: Path) -> dict[tuple[int, int], Any]:
    """Episodes by group and member, without what the clock says."""
    found = {}
    for group in read_groups(folder / "gateway" / "episodes"):
        for episode in group.episodes:
            values = episode.to_json()
            for turn in values["turns"]:
                turn.pop("generating")
            found[episode.group, episode.member] = values
    return found


def episode(address: str, member: int, turns: int) -> list[Any]:
    name = f"agent-{member}"
    control(address, "/sessions", name=name, group=0, member=member, seed=5)
    messages = play(address, name, turns)
    control(address, f"/sessions/{name}/reward", value=float(member), key="end")
    control(address, f"/sessions/{name}/end", success=member > 0)
    return messages


def test_plays_and_writes_what_the_trainer_reads(server: ServerProcess, tmp_path: Path) -> None:
    messages = episode(server.address, 1, turns=3)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    trace = traces(tmp_path)[0, 1]
    assert [turn["text"] for turn in trace["turns"]] == [message["content"] for message in messages[1::2]]
    assert [turn["fresh"] for turn in trace["turns"]] == [True, False, False]
    assert trace["turns"][-1]["reward"] == 1.0 and trace["success"] and trace["seed"] == 5


KILLS = int(os.environ.get("STARPOD_KILLS", "30"))
LAKE = {"size": 8, "success_rate": 0.7}
ACTIONS = ("Left", "Down", "Right", "Up")


@contextlib.contextmanager
def forked(folder: Path, model: Path) -> Iterator[dict[str, ServerProcess]]:
    """A gateway, the engine that it samples from, and two servers of environments: each is soon back after a kill."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str) -> ServerProcess:
            command = [sys.executable, "-m", "tests.tools.gateway.forked", *arguments]
            port = stack.enter_context(held_port())
            process = ServerProcess(command, {"OMP_NUM_THREADS": "1"}, port)
            stack.callback(process.close)
            return process

        servers = {"engine": begin("engine", str(model))}
        servers |= {name: begin("serve", "frozen_lake-v1") for name in ("environments", "more environments")}
        gateway = ("gateway", str(model), "--folder", str(folder / "gateway"), "--max-tokens", "12")
        yield servers | {"gateway": begin(*gateway, "--engine", "vllm_remote", "--url", servers["engine"].address)}


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
    """At least so many episodes of each member, and more until the event."""

    async def play(fleet: Fleet, member: int) -> list[list[tuple[Any, ...]]]:
        played: list[list[tuple[Any, ...]]] = []
        while len(played) < counts[member] or not over.is_set():
            played.append(await walk(fleet, servers["gateway"].address, member, len(played), turns))
        return played

    addresses = [servers["environments"].address, servers["more environments"].address]
    async with Fleet(addresses, timeout=1.0, grace=0.1, health_seconds=0.2, patience=120.0) as fleet:
        return await asyncio.gather(*(play(fleet, member) for member in range(len(counts))))


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
        for child in children_of(servers[name].pid):
            os.kill(child, signal.SIGKILL)
            counts[name] += 1
    return counts


@pytest.mark.minutes
@pytest.mark.timeout(300 + 10 * KILLS)
async def test_kills_of_gateway_engine_and_environments_are_not_to_be_seen(model: Path, tmp_path: Path) -> None:
    """STARPOD_KILLS=300 for as many of them."""
    over = asyncio.Event()
    turns: Counter[int] = Counter()
    with forked(tmp_path / "killed", model) as servers:
        playing = asyncio.create_task(walks(servers, [1] * 4, over, turns))
        counts = await kill(servers, KILLS, turns)
        over.set()
        killed = await playing
    with forked(tmp_path / "calm", model) as servers:
        calm = await walks(servers, [len(episodes) for episodes in killed], over, Counter())
    print(f"{counts.total()} kills, {dict(counts)}; {sum(map(len, killed))} episodes, {turns.total()} turns")
    assert killed == calm
    assert traces(tmp_path / "killed") == traces(tmp_path / "calm")
    assert len(traces(tmp_path / "killed")) == sum(map(len, killed))


def test_listens_to_others_only_with_a_token() -> None:
    result = CliRunner().invoke(gateway, ["model", "--host", "0.0.0.0"])
    assert result.exit_code == 2 and "give --gateway-token-file" in result.output


def test_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, [str(tmp_path / "none"), "--folder", str(tmp_path), "--port", "0"])
    assert isinstance(result.exception, ModelError) and "no such folder" in str(result.exception)


torch.set_num_threads(1)
