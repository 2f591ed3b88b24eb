"""`starpod gateway` as a process: its command line, and what a kill leaves."""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
import torch
from click.testing import CliRunner

from starpod.gateway.cli import gateway
from starpod.trainer.data.files import read_groups
from starpod.trainer.models.config import ModelConfig, ModelError, TinyConfig
from starpod.trainer.models.policy import build_policy
from tests.support import ServerProcess, children_of

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny = TinyConfig(hidden=32, layers=1, heads=2, intermediate=32, vocabulary=330)
    texts = ["Up Down Left Right go on 0 1 2"]
    build_policy(ModelConfig(tiny=tiny), texts=texts, critic="none", seed=1).save(folder)
    return folder


def start(model: Path, folder: Path, *more: str, module: str = "") -> ServerProcess:
    program = [module] if module else ["starpod.cli.main", "gateway"]
    command = [sys.executable, "-m", *program, str(model), "--folder", str(folder)]
    return ServerProcess([*command, "--max-tokens", "12", *more], {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    process = start(model, tmp_path / "gateway")
    yield process
    process.close()


def insist(call: Callable[[], Result]) -> Result:
    """The result of a call, however often the gateway is gone."""
    while True:
        try:
            return call()
        except openai.APIConnectionError:
            time.sleep(0.05)


def play(address: str, session: str, turns: int) -> list[Any]:
    """A conversation of an agent that knows nothing but OpenAI's client."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key=session, max_retries=0, timeout=60) as llm:
        messages: list[Any] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"go on {turn}"})
            completion = insist(lambda: llm.chat.completions.create(model="m", messages=messages))
            messages.append(completion.choices[0].message.model_dump())
    return messages


def control(address: str, path: str, **body: Any) -> None:
    with openai.OpenAI(base_url=address, api_key="x", max_retries=0) as http:
        insist(lambda: http.post(path, body=body, cast_to=object))


def traces(folder: Path) -> dict[int, Any]:
    """Episodes by their first prompt's session, without what the clock says."""
    found = {}
    for group in read_groups(folder / "gateway" / "episodes"):
        for episode in group.episodes:
            values = episode.to_json()
            for turn in values["turns"]:
                turn.pop("generating")
            found[episode.member] = values
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
    trace = traces(tmp_path)[1]
    assert [turn["text"] for turn in trace["turns"]] == [message["content"] for message in messages[1::2]]
    assert [turn["fresh"] for turn in trace["turns"]] == [True, False, False]
    assert trace["turns"][-1]["reward"] == 1.0 and trace["success"] and trace["seed"] == 5


@pytest.mark.minutes
@pytest.mark.timeout(1200)
def test_a_gateway_that_is_killed_all_the_time_gives_the_same_replies(model: Path, tmp_path: Path) -> None:
    members, turns, kills = 6, 40, 100
    calm = start(model, tmp_path / "calm" / "gateway", module="tests.tools.gateway.forked")
    try:
        for member in range(members):
            episode(calm.address, member, turns)
    finally:
        calm.close()
    killed = start(model, tmp_path / "killed" / "gateway", module="tests.tools.gateway.forked")
    count = 0
    try:
        with ThreadPoolExecutor(members) as pool:
            playing = [pool.submit(episode, killed.address, member, turns) for member in range(members)]
            rng = random.Random(1)
            while not all(each.done() for each in playing) or count < kills:
                time.sleep(rng.uniform(0.3, 1.5))
                for child in children_of(killed.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                    count += 1
        for each in playing:
            each.result()
    finally:
        killed.close()
    print(f"{count} kills")
    assert traces(tmp_path / "killed") == traces(tmp_path / "calm")
    assert len(traces(tmp_path / "killed")) == members


def test_listens_to_others_only_with_a_token() -> None:
    result = CliRunner().invoke(gateway, ["model", "--host", "0.0.0.0"])
    assert result.exit_code == 2 and "give --gateway-token-file" in result.output


def test_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, [str(tmp_path / "none"), "--folder", str(tmp_path), "--port", "0"])
    assert isinstance(result.exception, ModelError) and "no such folder" in str(result.exception)


torch.set_num_threads(1)
