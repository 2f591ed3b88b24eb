"""`starpod vllm`: a vLLM server for the engine `vllm_remote`."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import click

from starpod.serving.folders import make_locked_folder
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.engines.config import VLLM_PREFIX, vllm_sockets
from starpod.trainer.models.config import PACKAGED, ModelError

LEAST_BATCH = 4096
"""Minimum tokens per step of a CPU server. The batch must also hold the longest context, because prompts are not
chunked."""


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: starpod vllm smollm2 --max-model-len 1024 --port 8001",
)
@click.argument("model")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--max-model-len",
    "context",
    type=click.IntRange(1),
    default=SamplingConfig().max_episode_tokens,
    help="Maximum tokens of prompt and reply: at least sampling.max_episode_tokens of the runs.",
)
def vllm(model: str, arguments: tuple[str, ...], context: int) -> None:
    """Start a vLLM server from which runs with engine=vllm_remote sample.

    MODEL is smollm2, a Hugging Face name or a folder. ARGUMENTS are options of `vllm serve`, such as --host and --port.
    Anyone who reaches the server can replace its weights. It therefore listens on 127.0.0.1, unless you give --host.
    """
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException("this command needs the package vllm; see docs/training.md")
    import torch  # takes seconds

    words = ["--host=127.0.0.1", "--dtype=float32", f"--max-model-len={context}", "--logprobs-mode=processed_logprobs"]
    words.append("--enable-prompt-tokens-details")  # replies report how much of their prompt was cached
    if _has_scale_out():
        words.append("--enable-scale-out")
    # vLLM leaves its sockets behind. The next engine or server removes them with their folder.
    folder = make_locked_folder(VLLM_PREFIX, Path(tempfile.gettempdir()), survives_exec=True)
    environment = {"VLLM_SERVER_DEV_MODE": "1", **vllm_sockets(folder), **os.environ}
    if not torch.cuda.is_available():
        # Chunked prefill makes the worker rewind its random generator, which CPU generators do not support.
        batch = max(context, LEAST_BATCH)
        words += ["--enforce-eager", "--no-enable-chunked-prefill", f"--max-num-batched-tokens={batch}"]
        environment = _whole_cpu() | environment
    # Start the module, because `vllm serve` looks for a distribution named vllm, and the one for CPUs has another name.
    # If an option is given twice, the last one counts.
    program = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    os.execve(sys.executable, [*program, f"--model={_source(model)}", *words, *arguments], environment)


def _source(model: str) -> str:
    """Return the folder or name of the model that vLLM loads. Raises ClickException."""
    if model not in PACKAGED:
        return model
    from starpod.trainer.models.bundled import source_of  # which loads torch

    try:
        return source_of(model)
    except ModelError as error:
        raise click.ClickException(str(error)) from None


def _has_scale_out() -> bool:
    """Return whether this vLLM needs an option at its start to sample from token ids."""
    try:
        spec = importlib.util.find_spec("vllm.entrypoints.scale_out.factories")
    except ModuleNotFoundError:
        return False
    return spec is not None and "enable_scale_out" in Path(spec.origin or "").read_text(encoding="utf-8")


def _whole_cpu() -> dict[str, str]:
    """Return environment variables that make vLLM use OMP_NUM_THREADS threads, by default one per usable core.

    By default vLLM keeps one core free, which halves its speed on two cores.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    bind = "nobind" if "OMP_NUM_THREADS" in os.environ else cores
    return {"VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
