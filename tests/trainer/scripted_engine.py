"""An engine that says what a test wants, with made-up log-probabilities."""

import asyncio
from collections.abc import Callable

import torch

from starpod.trainer.engines.base import EngineStats, Reply, Request
from starpod.trainer.prompts.template import Template

Say = Callable[[Request, str], str]
"""Maps a request, and the text of its context, to the text of the reply."""


class ScriptedEngine:
    """Gives the replies that `say` names; a text is the reply to every request."""

    def __init__(self, template: Template, say: Say | str) -> None:
        self.template = template
        self.say: Say = say if callable(say) else lambda request, context: say
        self.requests: list[Request] = []
        self.forgotten: list[str] = []
        self.version = 0
        self.burst = 1
        """Number of tokens that are passed on at a time while a reply is sampled."""

    async def generate(self, request: Request) -> Reply:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.say(request, self.template.tokenizer.decode(request.prompt))
        ids = self.template.encode_reply(text)
        cut = ids[: request.max_tokens]
        for start in range(0, len(cut), self.burst) if request.on_tokens else ():
            assert request.on_tokens
            request.on_tokens(start, cut[start : start + self.burst])
            await asyncio.sleep(0)
        return Reply(cut, [-0.5] * len(cut), [self.version] * len(cut), "stop" if len(cut) == len(ids) else "length")

    def forget(self, conversation: str) -> None:
        self.forgotten.append(conversation)

    async def pause(self) -> None: ...

    async def load(self, version: int, model: torch.nn.Module) -> None:
        self.version = version

    async def resume(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...
