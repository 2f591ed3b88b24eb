"""Environments of the Open Reward Standard, served by its package on a free port: run it as a module."""

import asyncio
import base64
import socket

import uvicorn
from openreward.environments import Environment, ImageBlock, Server, Split, TextBlock, ToolOutput, terminal, tool
from PIL import Image
from pydantic import BaseModel

from starpod.env_server.authoring.drawing import encode_png


class Text(BaseModel):
    answer: str


class Pace(BaseModel):
    steps: int


class Sums(Environment):
    """A sum, answered once."""

    @classmethod
    def list_splits(cls):
        return [Split(name="hard", type="test"), Split(name="easy", type="train")]

    @classmethod
    def list_tasks(cls, split):
        return [{"a": n, "b": 100 if split == "hard" else 1} for n in range(5)]

    def get_prompt(self):
        return [TextBlock(text=f"{self.task_spec['a']} + {self.task_spec['b']} = ?")]

    @tool
    async def submit(self, params: Text) -> ToolOutput:
        """Submit the answer."""
        right = params.answer.strip() == str(self.task_spec["a"] + self.task_spec["b"])
        told = [TextBlock(text="Right." if right else "Wrong.")]
        return ToolOutput(blocks=told, reward=float(right), finished=True, metadata={"right": right})


class Walk(Environment):
    """Steps to a place, counted by the class: a call that is made twice would show."""

    calls = 0

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"goal": goal} for goal in (3, 5, 7)]

    def setup(self):
        self.place = 0

    def get_prompt(self):
        return [TextBlock(text=f"Walk to {self.task_spec['goal']}.")]

    @tool
    async def walk(self, params: Pace) -> ToolOutput:
        """Walks some steps; slowly."""
        Walk.calls += 1
        await asyncio.sleep(0.05)
        self.place += params.steps
        picture = base64.b64encode(encode_png(Image.new("RGB", (4, 4)))).decode()
        shown = [TextBlock(text=f"You are at {self.place}."), ImageBlock(data=picture, mimeType="image/png")]
        return ToolOutput(blocks=shown, reward=0.1)

    @terminal
    @tool
    async def done(self, params: Text) -> ToolOutput:
        """Says that the walk is over."""
        there = self.place == self.task_spec["goal"]
        return ToolOutput(blocks=[TextBlock(text=f"You said: {params.answer}")], reward=float(there), finished=True)

    @tool
    async def count(self) -> ToolOutput:
        """Tells how often anybody walked."""
        return ToolOutput(blocks=[TextBlock(text=str(Walk.calls))])


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"Serving on 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(Server([Sums, Walk]).app, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
