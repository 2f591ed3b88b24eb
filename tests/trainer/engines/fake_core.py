"""A slow and exact fake of vLLM's handling of requests, weights and pauses, in plain transformers without a cache."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.engines.vllm_facts import SAMPLING_PARAMETERS


class Paused(Exception):
    """Newer versions refuse requests between pause and resume."""

    status_code = 503


def check_sampling(values: Mapping[str, Any]) -> None:
    """Raises AssertionError for parameters that vLLM refuses, or that ask for other replies than the engines want."""
    assert set(values) <= SAMPLING_PARAMETERS, f"unknown parameters: {set(values) - SAMPLING_PARAMETERS}"
    assert 0 <= values["temperature"] <= 2 and -(2**63) <= values["seed"] < 2**63
    assert values["ignore_eos"], "else other tokens than those of the request end a reply"
    assert values["logprobs"] == 0 and not values["detokenize"]


@dataclass(slots=True)
class Sampled:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


class FakeCore:
    """One server's engine.

    refuses: answer requests with `Paused` during a pause, as newer versions do, instead of keeping them until resume.
    log: what was asked of it, in order. tick: awaited before each token, so that a test can hold sampling up.
    """

    def __init__(self, folder: Path | None = None, model: Any = None, *, refuses: bool = False) -> None:
        self.model = model
        self.log: list[str] = []
        self.refuses = refuses
        self.tick: Any = lambda: asyncio.sleep(0)
        self.running: dict[str, Sampled] = {}
        self.most_running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._generation = 0
        self._salts: dict[str, int] = {}
        if folder is not None:
            config = AutoConfig.from_pretrained(folder)
            assert config.architectures, "vLLM finds its model class by this"
            self.model = AutoModelForCausalLM.from_config(config).eval()
            self.reload(folder)
            self.log.clear()

    async def sample(
        self, request_id: str, prompt: Sequence[int], salt: str | None, values: Mapping[str, Any]
    ) -> Sampled:
        assert request_id not in self.running, "a request id is used twice at once"
        assert prompt, "vLLM refuses empty prompts"
        if not self._open.is_set():
            if self.refuses:
                raise Paused("paused")
            await self._open.wait()
        # Keys and values of other weights must not be found under the same salt.
        assert self._salts.setdefault(salt or "", self._generation) == self._generation, f"salt {salt} is stale"
        sampled = self.running[request_id] = Sampled()
        self.most_running = max(self.most_running, len(self.running))
        draws = torch.Generator().manual_seed(values["seed"])
        temperature = values["temperature"]
        try:
            while sampled.finish is None:
                await self.tick()
                if sampled.finish is not None:
                    break
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*prompt, *sampled.tokens]])).logits[0, -1].float()
                logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
                drawn = torch.multinomial(logprobs.exp(), 1, generator=draws) if temperature else logprobs.argmax()
                token = int(drawn)
                sampled.tokens.append(token)
                sampled.logprobs.append(float(logprobs[token]))
                if token in values["stop_token_ids"]:
                    sampled.finish = "stop"
                elif len(sampled.tokens) >= values["max_tokens"]:
                    sampled.finish = "length"
        finally:
            del self.running[request_id]
        return sampled

    async def parts(self, request_id: str, *arguments: Any) -> AsyncIterator[Sampled]:
        """`sample` in parts, as tokens are sampled. The last part has the finish reason."""
        sampling, sent = asyncio.ensure_future(self.sample(request_id, *arguments)), 0
        try:
            while True:
                await asyncio.wait((sampling,), timeout=0.001)
                ended = sampling.done()
                whole = sampling.result() if ended else self.running.get(request_id, Sampled())
                if ended or len(whole.tokens) > sent:
                    yield Sampled(whole.tokens[sent:], whole.logprobs[sent:], whole.finish if ended else None)
                    sent = len(whole.tokens)
                if ended:
                    return
        finally:
            sampling.cancel()

    def pause(self, mode: str) -> None:
        assert mode == "abort"
        self.log.append("pause")
        self._open.clear()
        for sampled in self.running.values():
            sampled.finish = "abort"

    def resume(self) -> None:
        self.log.append("resume")
        self._open.set()

    def reload(self, folder: Path) -> None:
        """The worker's reload_weights: all parameters, by their names in the checkpoint."""
        self.log.append("reload")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no safetensors in {folder}")
        weights = dict(itertools.chain.from_iterable(load_file(file).items() for file in files))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                parameter.copy_(weights.pop(name))
        assert not weights, f"unknown weights: {sorted(weights)}"
        self._generation += 1
