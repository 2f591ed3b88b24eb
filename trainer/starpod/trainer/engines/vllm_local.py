"""vLLM in this process's care: its engine core and workers are children of this process, on this machine's GPUs.

Written against vllm 0.20 to 0.33. What differs between them is not used: native weight transfer changed its calls and
the form of its CUDA handles twice in that range, while `collective_rpc` and `reload_weights` stayed what they were.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from typing import Any

import torch

from starpod.trainer.engines.base import Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.errors import EngineError
from starpod.trainer.engines.served import Piece, ServedEngine
from starpod.trainer.engines.vllm_worker import pack_handles
from starpod.trainer.engines.weights import make_folder, weights_of, write_weights

MISSING = (
    "engine vllm needs the package vllm, on a machine with a GPU; from a clone of the repository: pip install '.[vllm]'"
)
WORKER_EXTENSION = "starpod.trainer.engines.vllm_worker.WeightReceiver"


class LocalVllm(ServedEngine):
    """vLLM's AsyncLLM behind the five verbs.

    The same seed gives the same reply up to the rounding that depends on what else is in the batch; with
    VLLM_BATCH_INVARIANT=1 in the environment, exactly. Building it takes a minute: the model is loaded and compiled.

    model: a Hugging Face causal language model. Raises EngineError without vllm or a GPU.
    """

    def __init__(self, config: EngineConfig, model: torch.nn.Module, *, max_context: int) -> None:
        super().__init__(slots=config.slots, max_context=max_context)
        try:
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(f"{MISSING} ({error})") from None
        if not torch.cuda.is_available():
            raise EngineError("engine vllm needs a GPU, and torch sees none; engine=torch runs on the CPU")
        self._vllm = vllm
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._ids = itertools.count()
        on_gpu = next(model.parameters()).is_cuda
        self._ipc = config.handover == "ipc" or (config.handover == "auto" and config.tensor_parallel == 1 and on_gpu)
        if self._ipc and not on_gpu:
            raise EngineError("engine.handover ipc reads the policy's GPU memory, and the policy is on the CPU")
        self._folder = make_folder(config.handover_folder)
        start = self._folder / "start"
        try:
            write_weights(model, start)
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=str(start),
                    skip_tokenizer_init=True,
                    dtype=config.dtype,
                    max_model_len=max_context,
                    max_num_seqs=config.slots,
                    gpu_memory_utilization=config.gpu_memory_fraction,
                    tensor_parallel_size=config.tensor_parallel,
                    enable_prefix_caching=True,
                    # At the request's temperature; the default is before it.
                    logprobs_mode="processed_logprobs",
                    worker_extension_cls=WORKER_EXTENSION,
                    disable_log_stats=True,
                )
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        shutil.rmtree(start, ignore_errors=True)

    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        parameters = self._vllm.SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=limit,
            seed=seed,
            stop_token_ids=sorted(request.stop),
            # The request's own stop ids count, and no others that the model's files name.
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=self._final_only,
        )
        tokens = self._vllm.TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
        last: Any = None
        try:
            async for output in self._llm.generate(tokens, parameters, request_id=f"{self._name}-{next(self._ids)}"):
                last = output
        except ValueError as error:
            raise EngineError(f"vLLM refused a request: {error}") from error
        except Exception as error:
            if not self._open.is_set() and getattr(error, "status_code", None) == 503:
                return Piece([], [], aborted=True)  # newer versions refuse what comes during a pause
            raise EngineError(f"vLLM stopped: {type(error).__name__}: {error}") from error
        if last is None:
            return Piece([], [], aborted=True)
        sampled = last.outputs[0]
        chosen = list(sampled.token_ids)
        logprobs = [float(place[token].logprob) for place, token in zip(sampled.logprobs or (), chosen, strict=False)]
        return Piece(chosen, logprobs, sampled.finish_reason == "abort", last.num_cached_tokens or 0)

    async def _halt(self) -> None:
        await self._llm.pause_generation(mode="abort")

    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        try:
            if self._ipc:
                # Held until the workers have copied them: a handle does not keep its memory.
                weights = [(name, weight.contiguous()) for name, weight in weights_of(model)]
                torch.cuda.synchronize()
                await self._llm.collective_rpc("starpod_receive", args=(pack_handles(weights),))
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                return
            folder = self._folder / f"weights-{version}"
            try:
                await asyncio.to_thread(write_weights, model, folder)
                await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except Exception as error:
            raise EngineError(f"vLLM did not take version {version} of the weights: {error}") from error

    async def _go_on(self) -> None:
        await self._llm.resume_generation()

    async def _shut_down(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)
        shutil.rmtree(self._folder, ignore_errors=True)
