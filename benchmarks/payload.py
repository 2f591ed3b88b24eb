"""An environment that does nothing but show: observations of a given size, as text or as an image.

starpod serve --environment-module benchmarks/payload.py payload-v1
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from starpod.env_server.environment import Environment, EnvironmentOptions, EnvironmentSpec, Image, Outcome, Part


class PayloadOptions(EnvironmentOptions):
    """What is shown."""

    size: int = Field(default=100, ge=1, le=16 * 2**20, description="Bytes of an observation.")
    kind: Literal["text", "image"] = Field(default="text", description="One text, or one picture's bytes.")


class Payload(Environment):
    """Episodes without end. No observation equals the one before."""

    spec = EnvironmentSpec(id="payload-v1", version="1.0.0", title="Payload", actions=("next",))
    Options = PayloadOptions
    options: PayloadOptions

    count: int = 0

    def reset(self, rng: random.Random) -> None:
        self.count = 0

    def step(self, action: str) -> Outcome:
        self.count += 1
        return Outcome()

    def observe(self) -> str | Sequence[Part]:
        # Half of it changes and half does not, as on most screens; nothing compresses on the way.
        text = f"{self.count:08d}"[: self.options.size]
        text += "x" * (self.options.size - len(text))
        return text if self.options.kind == "text" else [Image(text.encode())]

    def render(self, mode: str = "text") -> str:
        return f"{self.options.size} bytes, {self.count} times"
