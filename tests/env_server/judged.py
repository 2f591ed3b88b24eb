"""An environment that asks a simulated user and a judge; `Model` of tests/fake_openai.py answers both.

STARPOD_JUDGE_URL: where the model is. STARPOD_TEST_LINGER: seconds that a step rests after its last reply.
"""

import os
import random
import time
from typing import ClassVar

from starpod.env_server import ChatModel, Concurrency, Environment, EnvironmentSpec, Limits, Outcome


class Judged(Environment):
    """An environment that shows the agent's words to a user, who answers, and to a judge, whose mark is the reward."""

    spec = EnvironmentSpec(
        id="judged-v1",
        version="1.0.0",
        title="Say something",
        grammar="a sentence; `bye` ends it, and `swallow` hides what goes wrong",
        limits=Limits(max_turns=20),
        concurrency=Concurrency.THREAD,
        effects=True,
    )
    model: ClassVar[ChatModel]

    @classmethod
    def prepare(cls) -> None:
        cls.model = ChatModel.from_variables("STARPOD_JUDGE")

    def reset(self, rng: random.Random) -> None:
        self.lines = [self.model.ask(self, [{"role": "user", "content": f"open {self.seed}"}])]
        self.steps = 0

    def step(self, action: str) -> Outcome:
        self.steps += 1  # before anything is asked: a turn that fails must not leave it so
        self.lines += [action, self.model.ask(self, [{"role": "user", "content": f"user {self.lines} {action}"}])]
        try:
            question = [{"role": "user", "content": f"judge {self.lines} {action}"}]
            mark = self.model.ask(self, question, read=float, temperature=1.0)
        except Exception:
            if action != "swallow":
                raise
            mark = 0.0
        time.sleep(float(os.environ.get("STARPOD_TEST_LINGER", "0")))
        return Outcome(reward=mark, terminated=action == "bye")

    def render(self, mode: str = "text") -> str:
        return f"{self.steps}: {' | '.join(self.lines)}"
