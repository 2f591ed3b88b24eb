"""Engines that stand for a model: one that says what a test wants, one that samples any ids at all."""

import asyncio
import random
from collections.abc import Callable

from starpod.gateway.lineage import ChatLayout
from starpod.gateway.session import Sampler
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.data.episode import Finish
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.prompts.template import Template
from tests.trainer.chat_templates import tokenizer
from tests.trainer.scripted_engine import ScriptedEngine


class RandomEngine(ScriptedEngine):
    """Samples ids in spellings that no tokenizer would choose. Remembers what it was asked and what it gave."""

    def __init__(self, template: Template, words: list[str], seed: int = 0) -> None:
        super().__init__(template, lambda request, text: "")
        self.words = words
        self.seed = seed
        self.sampled: list[tuple[Request, Reply]] = []

    async def generate(self, request: Request) -> Reply:
        rng = random.Random(f"{self.seed}/{request.seed}")
        text = "".join(rng.choice(self.words) for _ in range(rng.randint(1, 6)))
        ids: list[int] = []
        for character in text:  # one at a time: never merged
            ids += self.template.encode(character)
        ended = rng.random() < 0.8
        ids = ids[: request.max_tokens - 1] + ([self.template.end] if ended else [])
        ids = ids or [self.template.end]
        await asyncio.sleep(rng.choice([0, 0, 0.001]))
        logprobs = [-rng.random() for _ in ids]
        finish: Finish = "stop" if ids[-1] == self.template.end else "length"
        reply = Reply(ids, logprobs, [rng.randint(0, 3)] * len(ids), finish)
        self.sampled.append((request, reply))
        return reply


def scripted(
    say: Callable[[Request, str], str], template: str = "chatml", *, calls: str = "", **sampling: int
) -> Sampler:
    """A sampler whose replies are a function of the request and the prompt's text."""
    made = Template(tokenizer(template), calls=calls)
    config = SamplingConfig(**({"max_reply_tokens": 200, "max_episode_tokens": 4000} | sampling))
    return Sampler(engine=ScriptedEngine(made, say), layout=ChatLayout(made), sampling=config)


def engine_of(sampler: Sampler) -> ScriptedEngine:
    engine = sampler.engine
    assert isinstance(engine, ScriptedEngine)
    return engine
