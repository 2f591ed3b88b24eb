"""An environment with a simulated user and a judge, both played by a language model: guess the user's animal.

    starpod gateway smollm2
    export ANIMAL_MODEL_URL=http://127.0.0.1:8091/v1
    starpod serve examples/asked_user.py --effects effects/
    starpod play 127.0.0.1:50051 animal

Any server of OpenAI's chat completions works. Replies of the model are recorded in effects/ and never requested again.
"""

import random
import re
from typing import ClassVar

from starpod.env_server import INVALID, ChatModel, Concurrency, Environment, EnvironmentSpec, Limits, Outcome, digest

ANIMALS = ("cat", "dog", "elephant", "frog", "horse", "penguin", "shark", "spider")


def yes_or_no(text: str) -> bool:
    """Return whether a reply says yes. Raises ValueError if it says neither yes nor no: the model is asked again."""
    match = re.match(r"\W*(yes|no)\b", text.lower())
    if match is None:
        raise ValueError("neither yes nor no")
    return match[1] == "yes"


class Animal(Environment):
    spec = EnvironmentSpec(
        id="animal-v1",
        version="1.0.0",
        title="Which animal?",
        instructions="Find out which animal I think of. Ask me, or say: It is the NAME.",
        grammar="a question, or `It is the NAME.`",
        limits=Limits(max_turns=10),
        concurrency=Concurrency.THREAD,
        effects=True,
    )
    model: ClassVar[ChatModel]

    @classmethod
    def prepare(cls) -> None:
        cls.model = ChatModel.from_variables("ANIMAL_MODEL")

    def reset(self, rng: random.Random) -> None:
        self.animal = rng.choice(ANIMALS)
        self.said: list[str] = []

    def step(self, action: object) -> Outcome:
        if not isinstance(action, str):
            return INVALID
        if action.lower().startswith("it is"):
            right = self.judge(action)
            return Outcome(reward=float(right), terminated=True, success=right)
        self.said += [f"You: {action}", f"User: {self.answer(action)}"]
        return Outcome()

    def answer(self, question: str) -> str:
        """Return the simulated user's answer."""
        role = f"You think of an animal: the {self.animal}. Answer questions about it in one sentence, never name it."
        messages = [{"role": "system", "content": role}, {"role": "user", "content": question}]
        text = self.model.ask(self, messages, max_tokens=200, stop=[".", "\n"])
        return re.sub(self.animal, "animal", str(text), flags=re.IGNORECASE)

    def judge(self, guess: str) -> bool:
        question = f"The secret animal is the {self.animal}. The guess: {guess!r} Is that right? Say yes or no."
        messages = [{"role": "user", "content": question}]
        return bool(self.model.ask(self, messages, read=yes_or_no, max_tokens=50, stop=[",", ".", "\n"]))

    def render(self, mode: str = "text") -> str:
        return "\n".join(self.said[-2:]) or "I think of an animal."

    def state_key(self) -> bytes:
        return digest("\n".join([self.animal, *self.said]))
