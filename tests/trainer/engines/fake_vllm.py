"""A stand-in for the package vllm: the classes that the engine in process uses, with their signatures."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.trainer.engines.fake_core import FakeCore, Sampled, check_sampling
from tests.trainer.engines.vllm_facts import ENGINE_ARGUMENTS


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams:
    def __init__(self, *, output_kind: RequestOutputKind, **values: Any) -> None:
        check_sampling(values)
        assert output_kind is not RequestOutputKind.CUMULATIVE
        self.in_parts = output_kind is RequestOutputKind.DELTA
        self.values = values


def TokensPrompt(*, prompt_token_ids: list[int], cache_salt: str) -> dict[str, Any]:
    return {"prompt_token_ids": prompt_token_ids, "cache_salt": cache_salt}


def AsyncEngineArgs(**values: Any) -> SimpleNamespace:
    assert set(values) <= ENGINE_ARGUMENTS, f"unknown arguments: {set(values) - ENGINE_ARGUMENTS}"
    return SimpleNamespace(**values)


class EngineCoreProc:
    @staticmethod
    def run_engine_core(*args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any) -> None:
        """The program of the process that computes; the stand-in has none."""


class AsyncLLM:
    made: list["AsyncLLM"] = []  # noqa: RUF012 - the tests look at what the engine made

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.program = EngineCoreProc.run_engine_core
        self.sockets = os.environ.get("VLLM_RPC_BASE_PATH", "")
        self.core = FakeCore(Path(arguments.model))
        self.shut_down = False
        self.output_handler: asyncio.Task[None] | None = None
        self.errored = False
        self.hung = False
        self.checks = 0
        self.worker: Any = None
        AsyncLLM.made.append(self)

    @classmethod
    def from_engine_args(cls, engine_args: SimpleNamespace) -> "AsyncLLM":
        return cls(engine_args)

    async def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        assert len(ids) + sampling_params.values["max_tokens"] <= self.arguments.max_model_len
        arguments = (request_id, ids, prompt["cache_salt"], sampling_params.values)
        if sampling_params.in_parts:
            async for part in self.core.parts(*arguments):
                yield _output(part)
        else:
            yield _output(await self.core.sample(*arguments))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.core.pause(mode)

    async def resume_generation(self) -> None:
        self.core.resume()

    async def sleep(self, level: int = 1) -> None:
        assert self.arguments.enable_sleep_mode and level == 1
        self.core.log.append("sleep")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.core.log.append("wake")
        return True

    async def is_sleeping(self) -> bool:
        if self.hung:
            await asyncio.Event().wait()
        self.checks += 1
        return False

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[None]:
        if method == "reload_weights":
            self.core.reload(Path(kwargs["weights_path"]))
            return [None]
        return [await asyncio.to_thread(getattr(self.worker, method), *args)]

    def shutdown(self, timeout: float | None = None) -> None:
        self.shut_down = True


def _output(sampled: Sampled) -> SimpleNamespace:
    pairs = zip(sampled.tokens, sampled.logprobs, strict=True)
    logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in pairs]
    output = SimpleNamespace(token_ids=sampled.tokens, logprobs=logprobs, finish_reason=sampled.finish)
    return SimpleNamespace(outputs=[output], num_cached_tokens=0, finished=sampled.finish is not None)


def put_modules(patch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes modules with these contents importable."""
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        patch.setitem(sys.modules, name, module)


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes the stand-in importable, and torch believe in a GPU."""
    contents = {
        "vllm": {"SamplingParams": SamplingParams, "TokensPrompt": TokensPrompt},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.core": {"EngineCoreProc": EngineCoreProc},
    }
    put_modules(patch, contents)
    patch.setattr("torch.cuda.is_available", lambda: True)
    for variable in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_LOGGING_LEVEL"):
        patch.setenv(variable, "")  # so that what an engine sets is gone with the patch
        patch.delenv(variable)
    patch.setattr(AsyncLLM, "made", [])
