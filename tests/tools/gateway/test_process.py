"""`starpod gateway` as a process: its command line, and what a kill leaves."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner

from starpod.cli.main import starpod
from starpod.gateway.cli import gateway
from starpod.gateway.serving import Serving
from starpod.trainer.agents.pretrained import find_pretrained
from starpod.trainer.configuration.config import Config
from starpod.trainer.models.config import ModelError
from tests.support import ServerProcess
from tests.tools.gateway.kills import play_among_kills, save_model, traces, trained_among_kills


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "starpod.cli.main", "gateway", str(model), "--out", str(tmp_path / "gateway")]
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


def test_what_it_writes_is_trained_on(server: ServerProcess, model: Path, tmp_path: Path) -> None:
    """`replay.offline`: the trainer reads episodes that a separate gateway has written."""
    said: dict[tuple[int, int], list[Any]] = {}
    for number in range(8):
        name, place = f"agent-{number}", divmod(number, 4)
        control(server.address, "/sessions", name=name, group=place[0], member=place[1], seed=5)
        said[place] = play(server.address, name, turns=2)
        control(server.address, f"/sessions/{name}/reward", value=float(len(said[place][-1]["content"])), key="end")
        control(server.address, f"/sessions/{name}/end", success=number > 3)
    server.close()
    episodes = tmp_path / "gateway" / "episodes"
    written = traces(episodes)
    assert written.keys() == said.keys()
    for place, messages in said.items():
        trace = written[place]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        assert [turn["text"] for turn in trace["turns"]] == [message["content"] for message in messages[1::2]]
        assert [turn["fresh"] for turn in trace["turns"]] == [True, False]
        assert trace["turns"][-1]["reward"] == len(messages[-1]["content"]) and trace["seed"] == 5
        assert trace["success"] == (place[0] == 1)
    words = [
        *("bandit", f"model={model}", f"replay.offline={episodes}", "prompt.prefill=false"),
        *("collect.groups=2", "collect.group_size=4", "algorithm=starpo-grpo"),
        *("evaluation.every=0", "evaluation.episodes=1", "evaluation.reference=[]", "warm_start.steps=0"),
        *("stop.iterations=1", "optimizer.lr=0.001"),
    ]
    run = tmp_path / "run"
    done = CliRunner().invoke(starpod, ["train", *words, "--run-dir", str(run)])
    assert done.exit_code == 0, done.output
    metrics = json.loads((run / "metrics.jsonl").read_text())["metrics"]
    returns = [trace["turns"][-1]["reward"] for trace in written.values()]
    assert (metrics["collect/episodes"], metrics["collect/return_mean"]) == (8, pytest.approx(fmean(returns)))
    assert metrics["update/grad_norm"] > 0


KILLS = int(os.environ.get("STARPOD_KILLS", "12"))


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
    found = trained_among_kills(tmp_path, 2)
    print(found)
    assert found["kills"]["trainer"] >= 1 and found["episodes"] > 0
    assert (found["episodes_lost"], found["traces_that_differ"]) == (0, 0)


def test_listens_to_others_only_with_a_token() -> None:
    result = CliRunner().invoke(gateway, ["model", "--host", "0.0.0.0"])
    assert result.exit_code == 2 and "give --gateway-token-file" in result.output


def test_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, [str(tmp_path / "none"), "--out", str(tmp_path), "--port", "0"])
    assert isinstance(result.exception, ModelError) and "no such folder" in str(result.exception)
    (run := tmp_path / "run" / "checkpoints").mkdir(parents=True)
    words = [str(run.parent), "--engine", "vllm_remote", "--url", "http://127.0.0.1:1", "--port", "0"]
    result = CliRunner().invoke(gateway, [*words, "--out", str(tmp_path)])
    assert isinstance(result.exception, ModelError) and f"starpod export {run.parent} OUT" in str(result.exception)


async def test_says_which_settings_of_a_run_do_not_apply(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate({"sampling": {"stop": ["</answer>"], "json_schema": {"type": "object"}}})
    found = replace(find_pretrained(str(model)), config=config)
    monkeypatch.setattr("starpod.gateway.serving.find_pretrained", lambda _: found)
    async with Serving(model=str(model), folder=tmp_path).start(1, 1e9):
        pass
    warnings = capsys.readouterr().err
    assert "sampling.stop does not apply" in warnings and "sampling.json_schema does not apply" in warnings


torch.set_num_threads(1)
