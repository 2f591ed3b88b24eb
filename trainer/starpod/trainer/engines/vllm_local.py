"""Local vLLM engine: its core and workers are children of this process, on this machine's GPUs or its CPU.

It supports vllm 0.31 to 0.33 and uses only what is stable in that range. vLLM's native weight transfer changed its
calls and its CUDA handles twice, whereas `collective_rpc` and `reload_weights` stayed the same.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from starpod.trainer.engines.base import EngineError, EngineLost, Request, UpdateLock
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.piece import Piece
from starpod.trainer.engines.served import ServedEngine, sampling_parameters
from starpod.trainer.engines.vllm_core import VllmCore
from starpod.trainer.engines.vllm_images import image_prompt, pretrained_view, write_processor
from starpod.trainer.engines.vllm_worker import gpu_of, sent_by_handles
from starpod.trainer.engines.weights import device_of, gather, make_folder, weights_of, write_weights
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel.ranks import Parallel, RankFailed

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
        self,
        config: EngineConfig,
        policy: Policy,
        *,
        max_context: int,
        parallel: Parallel | None = None,
        updates: UpdateLock | None = None,
    ) -> None:
        super().__init__(
            slots=config.slots,
            max_context=max_context,
            vocabulary=policy.vocabulary,
            # A new core needs the weights, which one of several ranks cannot gather alone.
            restarts=config.restarts if parallel is None or parallel.world == 1 else 0,
            parallel=parallel,
        )
        self._model = policy.model
        self._updates = updates or UpdateLock()
        self._tokenizer = policy.tokenizer
        self._view = pretrained_view(policy.model)
        self._ids = itertools.count()
        self._sleeps = config.sleep
        self._sockets = make_folder("")
        try:
            self._core = VllmCore(
                config, policy, max_context=max_context, parallel=self._parallel, sockets=self._sockets
            )
            on_gpu = device_of(self._model).type == "cuda"
            self._only_ipc = config.handover == "ipc"
            if self._only_ipc and (self._core.on_cpu or not on_gpu):
                raise EngineError("engine.handover ipc reads the policy's GPU memory, but the policy is on the CPU")
        except BaseException:
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise
        # None means undecided until it is known which GPU vLLM uses.
        possible = self._only_ipc or (config.handover == "auto" and config.tensor_parallel == 1 and on_gpu)
        self._ipc: bool | None = None if possible else False
        folder = make_folder(config.handover_folder) if self._parallel.is_first_on_machine else Path()
        self._folder = self._parallel.broadcast_on_machine(folder)
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
            self._parallel.do_together(partial(self._core.launch, folder))
        except Exception as error:
            if isinstance(error, RankFailed) and self._core.llm is not None:
                self._core.llm.shutdown()
            raise EngineError(f"vLLM did not start: {error}") from error

    def _write(self, model: torch.nn.Module, folder: Path) -> None:
        """Write the weights for all engines of this machine. All ranks take part in gathering them."""
        if self._parallel.is_first_on_machine:
            write_weights(model, folder, self._core.dtype)
            self._tokenizer.save_pretrained(folder)
            if self._view is not None:
                write_processor(self._view, self._tokenizer, folder)
        else:
            gather(weights_of(model, self._core.dtype))

    def _remove(self, folder: Path) -> None:
        if self._parallel.is_first_on_machine:
            shutil.rmtree(folder, ignore_errors=True)

    async def _restart(self) -> None:
        await self._core.stop()
        async with self._updates:
            await asyncio.to_thread(self._start)
            self._version = self._updates.version

    async def _sample(self, request: Request, prompt: list[int], limit: int, seed: int, salt: str) -> Piece:
        from vllm.sampling_params import RequestOutputKind

        settings = sampling_parameters(request, limit, seed)
        if structure := settings.pop("structured_outputs", None):
            settings["structured_outputs"] = self._core.vllm.sampling_params.StructuredOutputsParams(**structure)
        pauses = self._pauses

        async def sample() -> Piece:
            kind = RequestOutputKind.FINAL_ONLY if request.on_tokens is None else RequestOutputKind.DELTA
            parameters = self._core.vllm.SamplingParams(**settings, output_kind=kind)
            inputs = (
                image_prompt(prompt, request.images, self._model, salt)
                if min(prompt) < 0
                else self._core.vllm.TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
            )
            piece = Piece([], [])
            async for output in self._core.llm.generate(
                inputs, parameters, request_id=f"{self._name}-{next(self._ids)}"
            ):
                piece = piece.extend(_read_output(output), request, prompt)
            return piece

        try:
            piece = await self._core.watch.guard(sample())
        except EngineError:
            raise
        except Exception as error:
            if not self._open.is_set() and getattr(error, "status_code", None) == 503:
                return Piece([], [])  # refused during a pause
            if isinstance(error, ValueError) or type(error).__name__ == "VLLMValidationError":
                raise EngineError(f"vLLM refused a request: {type(error).__name__}: {error}") from error
            raise EngineLost(f"vLLM stopped: {type(error).__name__}: {error}") from error
        try:
            self._check_reply(piece, request, limit, pauses)
        except ValueError as error:
            raise EngineError(f"vLLM sampled {error}") from error
        return piece

    async def _halt(self) -> None:
        await self._core.ask("a pause", "pause_generation", mode="abort")
        if self._sleeps:
            await self._core.sleep()

    async def _hand_over(self, version: int, model: torch.nn.Module) -> None:
        # Ranks gather the weights together, so each step begins on all of them or on none.
        all_done = self._parallel.all_done
        await all_done(self._core.wake())
        self._model, self._updates.version = model, version
        try:
            if self._ipc is None:
                self._ipc = all(await all_done(self._is_on_gpu_of(model)))
            if self._ipc:
                async with sent_by_handles(weights_of(model, self._core.dtype), self._parallel) as address:
                    await self._core.ask(
                        "new weights", "collective_rpc", "starpod_receive", args=(address,), loads=True
                    )
                return
            folder = self._folder / f"weights-{version}"
            try:
                await all_done(self._parallel.in_thread(self._write, model, folder))
                arguments = {"weights_path": str(folder)}
                await all_done(
                    self._core.ask("new weights", "collective_rpc", "reload_weights", kwargs=arguments, loads=True)
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
        (vllm_gpu,) = await self._core.ask("which GPU it has", "collective_rpc", "starpod_gpu")
        if self._only_ipc and vllm_gpu != gpu:
            raise EngineError(
                f"engine.handover ipc is for one GPU, but the policy is on {gpu}, vLLM on {vllm_gpu}: give both the "
                "same, or set engine.handover to disk"
            )
        return bool(vllm_gpu == gpu)

    async def _go_on(self) -> None:
        await self._core.wake()
        await self._core.ask("resuming", "resume_generation")

    async def _shut_down(self) -> None:
        await self._core.stop(SHUTDOWN_SECONDS)
        self._remove_folders()

    def _remove_folders(self) -> None:
        self._remove(self._folder)
        shutil.rmtree(self._sockets, ignore_errors=True)


def _read_output(output: Any) -> Piece:
    result = output.outputs[0]
    tokens = list(result.token_ids)
    logprobs = [float(entry[token].logprob) for entry, token in zip(result.logprobs or (), tokens, strict=False)]
    return Piece(tokens, logprobs, result.finish_reason, output.num_cached_tokens or 0)
