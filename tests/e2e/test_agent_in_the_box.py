"""A program in a task's container asks the gateway of a run: its samples and the verifier's reward are one episode."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starpod.client import Fleet
from starpod.trainer.agents.base import Task
from starpod.trainer.agents.config import ProgramConfig, SamplingConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.program import load_programs
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.sample import samples_of
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.collect import Collector, Start
from tests.env_server.machines.tasks import TEXT_REWARD, missing, remove_image, write_task
from tests.support import ROOT, held_port, start_server
from tests.trainer.chat_templates import tokenizer
from tests.trainer.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.containers, pytest.mark.timeout(180)]

AGENT = """python3 - <<'END'
import json, os, subprocess, urllib.request
messages, text = [{"role": "user", "content": os.environ["TASK"]}], ""
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
while text != "I am done.":
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    result = subprocess.run(text, shell=True, capture_output=True, text=True).stdout
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Output: " + result}]
END"""
"""A small agent: each reply is a command."""


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Path]:
    if reason := missing():
        pytest.skip(reason)
    from starpod.env_server.machines.docker_engine import connect

    folder = write_task(tmp_path / "hello", tests=TEXT_REWARD)
    yield folder
    remove_image(connect(), folder)


def dials(*addresses: tuple[str, int]) -> str:
    """Return a command that prints which addresses it can connect to."""
    attempts = "".join(f"print(socket.socket().connect_ex({address!r}), end=';');" for address in addresses)
    return f'python3 -c "import socket;{attempts}"'


async def play(task: Path, command: str, replies: list[str], port: int, count: int = 2) -> list[Episode]:
    """Play a task by a program in its container, whose model gives these replies."""
    template = Template(tokenizer("chatml"))
    agents = EngineAgents(
        engine=ScriptedEngine(template, lambda _, text: replies[text.count("<|im_start|>assistant") - 1]),
        template=template,
        prompt=PromptConfig(),
        sampling=SamplingConfig(max_reply_tokens=600, max_episode_tokens=30_000),
    )
    program = (sys.executable, str(ROOT / "examples/agent_in_the_box.py"), command)
    with start_server(f"harbor:{task}#warm=0&reach=127.0.0.1:{port}") as server:
        async with (
            Fleet([server.address]) as fleet,
            load_programs()(ProgramConfig(command=program, port=port)) as wrap,
        ):
            collector: Any = Collector(
                fleet=fleet, agents=wrap(agents), task=Task("harbor-hello-v1", name="hello"), deadline=150
            )
            return list((await collector.play_group(Start(3, 7), count)).members)


async def test_samples_and_reward_are_one_episode_and_nothing_else_is_reached(task: Path) -> None:
    from starpod.env_server.machines.docker_engine import connect

    with socket.create_server(("", 0)) as other, held_port() as port:
        secret = other.getsockname()[1]
        host = connect().api.inspect_network("bridge")["IPAM"]["Config"][0].get("Gateway", "172.17.0.1")
        places = [("127.0.0.1", port), ("127.0.0.1", secret), (host, port), (host, secret), ("192.0.2.1", 80)]
        replies = [dials(*places), "echo hello > hello.txt", "I am done."]
        episodes = await play(task, AGENT, replies, port)
        containers = connect().api.containers(all=True, filters={"label": "starpod.server"})
    for episode in episodes:
        assert not episode.failed, episode.error
        sampled = [turn for turn in episode.turns if turn.reply]
        assert [turn.text for turn in sampled] == replies
        assert Batch([episode]).rewards_BT()[0, -1] == 1.0, "the last reply is paid"
        assert (episode.total_reward, episode.success, episode.end) == (1.0, True, "terminal")
        (sample,) = [sample for sample in samples_of(episode) if sample.tokens]
        assert sum(sample.sampled) == sum(len(turn.reply) for turn in sampled)
        assert "Output: 0;111;101;101;101;" in tokenizer("chatml").decode(sample.tokens), "refused, or no network"
    assert not [each for each in containers if "harbor-hello-v1" in each["Names"][0]]
