"""`starpod gateway` as a process: its command line, and what a kill leaves."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner

from starpod.gateway.cli import gateway
from starpod.trainer.data.files import read_groups
from starpod.trainer.models.config import ModelConfig, ModelError, TinyConfig
from starpod.trainer.models.policy import build_policy
from tests.support import ServerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny = TinyConfig(hidden=32, layers=1, heads=2, intermediate=32, vocabulary=330)
    texts = ["Up Down Left Right go on 0 1 2"]
    build_policy(ModelConfig(tiny=tiny), texts=texts, critic="none", seed=1).save(folder)
    return folder


def start(model: Path, folder: Path, *more: str) -> ServerProcess:
    command = [sys.executable, "-m", "starpod.cli.main", "gateway", str(model), "--folder", str(folder)]
    return ServerProcess([*command, "--max-tokens", "12", *more], {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    process = start(model, tmp_path / "gateway")
    yield process
    process.close()


def play(address: str, session: str, turns: int) -> list[Any]:
    """A conversation of an agent that knows nothing but OpenAI's client."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key=session, max_retries=20, timeout=60) as llm:
        messages: list[Any] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"go on {turn}"})
            messages.append(llm.chat.completions.create(model="m", messages=messages).choices[0].message.model_dump())
    return messages


def end(address: str, session: str, reward: float) -> None:
    with openai.OpenAI(base_url=address, api_key="x", max_retries=20) as http:
        http.post(f"/sessions/{session}/reward", body={"value": reward, "key": "end"}, cast_to=object)
        http.post(f"/sessions/{session}/end", body={"success": reward > 0}, cast_to=object)


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


def begin(address: str, session: str, member: int) -> None:
    with openai.OpenAI(base_url=address, api_key="x", max_retries=20) as http:
        http.post("/sessions", body={"name": session, "group": 0, "member": member, "seed": 5}, cast_to=object)


def episode(address: str, member: int, turns: int) -> list[Any]:
    begin(address, f"agent-{member}", member)
    messages = play(address, f"agent-{member}", turns)
    end(address, f"agent-{member}", float(member))
    return messages


def test_plays_and_writes_what_the_trainer_reads(server: ServerProcess, tmp_path: Path) -> None:
    messages = episode(server.address, 1, turns=3)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    trace = traces(tmp_path)[1]
    assert [turn["text"] for turn in trace["turns"]] == [message["content"] for message in messages[1::2]]
    assert [turn["fresh"] for turn in trace["turns"]] == [True, False, False]
    assert trace["turns"][-1]["reward"] == 1.0 and trace["success"] and trace["seed"] == 5


def _undisturbed_and_killed(model: Path, tmp_path: Path, *, members: int, turns: int, kills: int) -> None:
    calm = start(model, tmp_path / "calm" / "gateway")
    try:
        for member in range(members):
            episode(calm.address, member, turns)
    finally:
        calm.close()
    server = start(model, tmp_path / "killed" / "gateway")
    try:
        agents = [
            threading.Thread(target=episode, args=(server.address, member, turns), daemon=True)
            for member in range(members)
        ]
        for agent in agents:
            agent.start()
        killed = 0
        while any(agent.is_alive() for agent in agents) and killed < kills:
            agents[killed % members].join(0.3)
            server.restart()
            killed += 1
        for agent in agents:
            agent.join()
    finally:
        server.close()
    assert killed == kills
    assert traces(tmp_path / "killed") == traces(tmp_path / "calm")
    assert len(traces(tmp_path / "killed")) == members


@pytest.mark.minutes
@pytest.mark.timeout(1200)
def test_a_killed_gateway_goes_on_with_the_same_replies(model: Path, tmp_path: Path) -> None:
    _undisturbed_and_killed(model, tmp_path, members=6, turns=60, kills=20)


def test_listens_to_others_only_with_a_token() -> None:
    result = CliRunner().invoke(gateway, ["model", "--host", "0.0.0.0"])
    assert result.exit_code == 2 and "give --gateway-token-file" in result.output


def test_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, [str(tmp_path / "none"), "--folder", str(tmp_path), "--port", "0"])
    assert isinstance(result.exception, ModelError) and "no such folder" in str(result.exception)


torch.set_num_threads(1)
