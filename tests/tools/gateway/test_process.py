"""`starpod gateway` as a process: its command line, and what a kill leaves."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner

from starpod.gateway.cli import gateway
from starpod.trainer.models.config import ModelError
from tests.support import ServerProcess
from tests.tools.gateway.kills import play_among_kills, save_model, traces, trained_among_kills


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights."""
    return save_model(tmp_path_factory.mktemp("model"))


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
    trace = traces(tmp_path / "gateway" / "episodes")[0, 1]
    assert [turn["text"] for turn in trace["turns"]] == [message["content"] for message in messages[1::2]]
    assert [turn["fresh"] for turn in trace["turns"]] == [True, False, False]
    assert trace["turns"][-1]["reward"] == 1.0 and trace["success"] and trace["seed"] == 5


KILLS = int(os.environ.get("STARPOD_KILLS", "30"))


@pytest.mark.minutes
@pytest.mark.timeout(300 + 10 * KILLS)
@pytest.mark.parametrize("engine", ["vllm_remote", "torch"])
async def test_kills_of_gateway_engine_and_environments_are_not_to_be_seen(
    model: Path, tmp_path: Path, engine: Any
) -> None:
    """STARPOD_KILLS=300 for as many of them."""
    found = await play_among_kills(tmp_path, model, KILLS, engine)
    print(found)
    assert sum(found["kills"].values()) >= KILLS
    assert (found["steps_that_differ"], found["episodes_lost"], found["traces_that_differ"]) == (0, 0, 0)


@pytest.mark.minutes
@pytest.mark.timeout(600)
def test_kills_of_a_run_whose_agents_are_programs_are_not_to_be_seen(tmp_path: Path) -> None:
    found = trained_among_kills(tmp_path, 3)
    print(found)
    assert found["kills"]["trainer"] >= 2
    assert (found["episodes_lost"], found["traces_that_differ"]) == (0, 0)


def test_listens_to_others_only_with_a_token() -> None:
    result = CliRunner().invoke(gateway, ["model", "--host", "0.0.0.0"])
    assert result.exit_code == 2 and "give --gateway-token-file" in result.output


def test_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, [str(tmp_path / "none"), "--folder", str(tmp_path), "--port", "0"])
    assert isinstance(result.exception, ModelError) and "no such folder" in str(result.exception)


torch.set_num_threads(1)
