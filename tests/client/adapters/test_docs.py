"""The snippets of docs/adapters.md work as written, with another address and a tiny model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "adapters.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"

pytestmark = pytest.mark.filterwarnings("ignore")


def block(word: str, address: str, language: str = "python") -> str:
    (text,) = [text for kind, text in BLOCKS if kind == language and word in text]
    return text.replace("127.0.0.1:50051", address)


def execute(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(source, names)
    return names


def test_the_setting(server: ServerProcess) -> None:
    setting = execute(block("Reader(separator", server.address))["setting"]
    episode = setting.shared_fleet().run(setting.open({"seed": 1}))
    assert episode.reader.read("<answer>Up;Left</answer>") == ["Up", "Left"] and "5 rows" in episode.first


def test_every_block_is_tested() -> None:
    source = Path(__file__).read_text()
    words = re.findall(r'block\(\s*"([^"]+)"', source)
    for kind, text in BLOCKS:
        assert any(word in text for word in words), f"no test runs this block:\n{kind}\n{text}"


@pytest.mark.parametrize("form", ["runs/tools", "runs/talk"])
def test_trl(server: ServerProcess, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: make test-adapters")
    from tests.client.adapters.tiny import save_model

    monkeypatch.chdir(tmp_path)
    source = {"runs/tools": block("runs/tools", server.address), "runs/talk": block("runs/talk", server.address)}[form]
    smaller = {
        MODEL: str(save_model(tmp_path / "model")),
        "max_steps=200": "max_steps=2, logging_steps=1, report_to='none', use_cpu=True",
        "max_completion_length=1024": "max_completion_length=64",
    }
    for ours, theirs in smaller.items():
        assert ours in source
        source = source.replace(ours, theirs)
    trainer = execute(source)["trainer"]
    failed = [entry["starpod/failed"] for entry in trainer.state.log_history if "starpod/failed" in entry]
    assert failed == [0.0, 0.0] and trainer.state.global_step == 2


async def test_verl(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl", reason="verl is not installed: make test-adapters")
    import pandas

    from tests.client.adapters.test_verl import Engine, make_batch, make_worker
    from tests.client.adapters.tiny import save_model

    monkeypatch.chdir(tmp_path)
    execute(block("lake.parquet", server.address))
    infos = list(pandas.read_parquet("lake.parquet")["extra_info"][:2])
    (tmp_path / "loops.yaml").write_text(block("StarpodAgentLoop", server.address, "yaml"))
    engine = Engine(lambda said: "<answer>Up</answer>")
    lengths = [f"actor_rollout_ref.rollout.{kind}_length=2000" for kind in ("prompt", "response")]
    worker = make_worker(save_model(tmp_path / "model"), tmp_path / "loops.yaml", engine, "lake", *lengths)
    out = await worker.generate_sequences(make_batch(*infos))
    assert len(out.batch["rm_scores"]) == 2 and all(turns >= 1 for turns in out.non_tensor_batch["turns"])


def test_skyrl(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym", reason="SkyRL-gym is not installed: make test-adapters")
    import pandas

    monkeypatch.chdir(tmp_path)
    execute(block("skyrl_gym.register", server.address))
    execute(block("lake_skyrl.parquet", server.address))
    row = pandas.read_parquet("lake_skyrl.parquet").iloc[5].to_dict()
    prompt = [dict(message) for message in row.pop("prompt")]
    env = skyrl_gym.make(row.pop("env_class"), env_config={}, extras={**row, "max_turns": 3})
    shown, metadata = env.init(prompt)
    assert metadata["seed"] == 5 and "frozen lake" in shown[-1]["content"]
    assert env.step("<answer>Up</answer>")["metadata"]["turns"] == 1
    env.close()


async def test_verifiers(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="verifiers is not installed: make test-adapters")
    import asyncio

    from tests.client.adapters.test_verifiers import serve_endpoint

    (tmp_path / "lake.py").write_text(block("__all__", server.address))
    command = shlex.split(block("vf-eval", server.address, "").replace("-n 8 -r 4", "-n 3 -r 2"))
    async with serve_endpoint() as endpoint:
        endpoint.say = lambda messages: "<answer>Up || Left</answer>"
        arguments = [endpoint.base_url if word.endswith("/v1") else word for word in command[1:]]
        process = await asyncio.to_thread(
            subprocess.run,
            [str(Path(sys.executable).with_name("vf-eval")), *arguments, "--no-rich"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert process.returncode == 0, process.stdout + process.stderr
    (results,) = tmp_path.glob("outputs/*/traces.jsonl")
    lines = results.read_text().splitlines()
    assert len(lines) == 3 * 2 and all('"episode_reward"' in line for line in lines), process.stdout
