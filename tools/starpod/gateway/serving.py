"""A standalone gateway, which loads the model, starts the engine and holds the sessions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starpod.gateway.lineage import ChatLayout
from starpod.gateway.records import Records
from starpod.gateway.session import Sampler
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.agents.pretrained import find_pretrained
from starpod.trainer.checkpoints.export import read_settings
from starpod.trainer.checkpoints.trained import is_run_or_checkpoint
from starpod.trainer.configuration.config import Config
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.bundled import source_of
from starpod.trainer.models.config import ModelError
from starpod.trainer.models.policies import policy_of
from starpod.trainer.output.files import hold_lock
from starpod.trainer.prompts.template import Template


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The settings of a gateway. None means the value of the model's run, or the default if there is no run."""

    model: str
    """A run folder, a checkpoint, a Hugging Face model or smollm2."""
    folder: Path
    """Folder for sessions and episodes."""
    engine: Literal["torch", "vllm", "vllm_remote"] = "torch"
    urls: Sequence[str] = ()
    """URLs of the servers that the engine `vllm_remote` uses."""
    temperature: float | None = None
    max_tokens: int | None = None
    """Maximum number of tokens of a reply."""
    context: int | None = None
    """Maximum number of tokens of prompt and reply together."""
    calls: str = ""
    """Name of the format of tool calls; empty: the one that the chat template uses."""
    seed: int = 0

    @asynccontextmanager
    async def start(self, most_sessions: int, idle_seconds: float) -> AsyncIterator[Records]:
        """Start the engine and yield the sessions.

        Raises:
            ConfigError, ModelError, EngineError, ValueError: the model or the engine cannot be used.
            FolderLocked: another gateway uses the folder.
        """
        config = EngineConfig(name=self.engine, urls=tuple(self.urls))
        if self.engine == "vllm_remote":
            if is_run_or_checkpoint(Path(self.model)):
                raise ModelError(
                    f"{self.model} has checkpoints, but the engine vllm_remote needs the model that its servers serve: "
                    f"type `starpod export {self.model} OUT`, serve OUT with `starpod vllm`, and name OUT here"
                )
            from transformers import AutoConfig, AutoTokenizer

            from starpod.trainer.engines.vllm_remote import RemoteVllm

            folder = source_of(self.model)
            template = Template(AutoTokenizer.from_pretrained(folder), calls=self.calls)
            sampling = self._sampling(read_settings(Path(folder)))
            vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
            engine: Any = RemoteVllm(config, max_context=sampling.max_episode_tokens, vocabulary=vocabulary)
        else:
            found = find_pretrained(self.model)
            policy = policy_of(found.load())
            template = Template(policy.tokenizer, calls=self.calls)
            sampling = self._sampling(found.config)
            engine = build_engine(config, policy, max_context=sampling.max_episode_tokens)
        try:
            layout = ChatLayout(template)
            ignored = (
                f"the run's sampling.{name} does not apply here: requests name their own {own}"
                for name, own in (("stop", "stop texts"), ("json_schema", "response format"))
                if getattr(sampling, name) not in ((), None)
            )
            for line in (*layout.warnings(), *ignored):
                print(f"warning: {line}", file=sys.stderr)
            sampler = Sampler(
                engine=engine,
                layout=layout,
                sampling=sampling,
                seed=self.seed,
                temperature=self.temperature,
            )
            self.folder.mkdir(parents=True, exist_ok=True)
            with hold_lock(self.folder):
                records = Records(sampler, self.folder, max_sessions=most_sessions, idle_seconds=idle_seconds)
                records.restore()
                watcher = asyncio.create_task(records.watch())
                try:
                    yield records
                finally:
                    watcher.cancel()
        finally:
            await engine.close()

    def _sampling(self, config: Config | None) -> SamplingConfig:
        sampling = config.sampling if config else SamplingConfig()
        overrides = {"max_reply_tokens": self.max_tokens, "max_episode_tokens": self.context}
        values = {**sampling.to_dict(), **{name: value for name, value in overrides.items() if value is not None}}
        return SamplingConfig.model_validate(values)
