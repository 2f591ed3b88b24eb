"""Episodes that a program plays: its replies and steps become turns that the trainer trains on like its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from starpod.client import Fleet, Limits
from starpod.gateway.programs import ProgramAgents, programs
from starpod.trainer.agents.base import AgentRefused, Task
from starpod.trainer.agents.config import ProgramConfig, SamplingConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.program import load_programs
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.base import Engine, EngineError, Request
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.collect import Collector, Start
from tests.support import ROOT, ServerProcess
from tests.trainer.chat_templates import tokenizer
from tests.trainer.scripted_engine import ScriptedEngine

TOOLS = """
import json, os, sys, urllib.request
def call(url, body=None):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))
def ask(*messages, **more):
    told = [{"role": role, "content": text} for role, text in messages]
    body = {"model": "m", "messages": told, **more}
    return call(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]
url = os.environ["STARPOD_ENVIRONMENT_URL"]
state = call(url)
"""
LAKE = Task(  # an agent may say much between two steps
    "frozen_lake-v1",
    options={"size": 4, "success_rate": 1.0},
    limits=Limits(max_turns=12),
    actions=("Left", "Down", "Right", "Up"),
    name="lake",
)
EXAMPLE = f"""
import runpy
sys.path.insert(0, {str(ROOT / "examples")!r})
runpy.run_path({str(ROOT / "examples")!r} + "/NAME", run_name="__main__")
"""
"""Runs a program of examples/."""
PLAYS = """
history = []
while not state["done"]:
    history.append(("user", state["observation"]))
    text = ask(*history)
    history.append(("assistant", text))
    state = call(url + "/step", {"actions": [text], "step_index": state["step_index"]})
"""


@asynccontextmanager
async def collecting_with(
    engine: Engine,
    template: Template,
    server: ServerProcess,
    folder: Path,
    program: str,
    *,
    at_once: int = 2,
    temperature: float | None = None,
    **sampling: int,
) -> AsyncIterator[Collector[Any]]:
    """Plays the lake by a program, whose model the engine samples."""
    file = folder / "agent.py"
    file.write_text(TOOLS + program)
    agents = EngineAgents(
        engine=engine,
        template=template,
        prompt=PromptConfig(),
        sampling=SamplingConfig(**({"max_reply_tokens": 40, "max_episode_tokens": 3000} | sampling)),
        temperature=temperature,
    )
    config = ProgramConfig(command=(sys.executable, str(file)), at_once=at_once)
    async with Fleet([server.address]) as fleet, load_programs()(config) as wrap:
        yield Collector(fleet=fleet, agents=wrap(agents), task=LAKE, deadline=250)


@asynccontextmanager
async def collector(
    server: ServerProcess, folder: Path, program: str, say: Any = None, **settings: int
) -> AsyncIterator[tuple[Collector[Any], ScriptedEngine]]:
    """A collector whose model says `Right` and `Down` alternately, or the given replies."""
    template = Template(tokenizer("chatml"))
    engine = ScriptedEngine(template, say or (lambda request, text: ("Right", "Down")[text.count("assistant") % 2]))
    async with collecting_with(engine, template, server, folder, program, **settings) as collecting:
        yield collecting, engine


async def play(server: ServerProcess, folder: Path, program: str, say: Any = None, **sampling: int) -> Episode:
    async with collector(server, folder, program, say, **sampling) as (collecting, _):
        return (await collecting.play_group(Start(3, 7), 1)).members[0]


async def test_turns_are_replies_with_their_steps(server: ServerProcess, tmp_path: Path) -> None:
    async with collector(server, tmp_path, PLAYS) as (collecting, engine):
        group = await collecting.play_group(Start(3, 7), 3)
    assert [episode.end for episode in group.members] == ["terminal"] * 3
    for episode in group.members:
        assert [turn.actions for turn in episode.turns] == [[turn.text] for turn in episode.turns]
        assert {turn.executed for turn in episode.turns} == {1}
        assert (episode.group, episode.task, episode.seed) == (3, "lake", 7)
        (sample,) = samples_of(episode)
        prompts = [request.prompt for request in engine.requests]
        assert sum(sample.tokens[: len(prompt)] == prompt for prompt in prompts) >= len(episode.turns)
    assert len({request.seed for request in engine.requests}) == len(engine.requests), "each reply has its own luck"


async def test_the_example_plays(server: ServerProcess, tmp_path: Path) -> None:
    path = ["Right", "Down"]
    program = EXAMPLE.replace("NAME", "openai_agent.py")
    episode = await play(
        server, tmp_path, program, lambda _, text: f"<answer>{path[text.count('assistant') % 2]}</answer>"
    )
    assert episode.end == "terminal" and not episode.failed, episode.error
    assert [turn.actions for turn in episode.turns] == [[path[(1 + at) % 2]] for at in range(len(episode.turns))]


async def test_replies_without_steps_and_steps_without_replies_are_turns(server: ServerProcess, tmp_path: Path) -> None:
    program = """
plan = ask(("user", "plan"))
ask(("system", "helper"), ("user", "help"))
ask(("user", "plan"), ("assistant", plan), ("user", state["observation"]))
for action in ("Up", "Left"):
    state = call(url + "/step", {"actions": action})
ask(("user", "what now"))
"""
    episode = await play(server, tmp_path, program)
    assert [(bool(turn.reply), turn.actions, turn.fresh) for turn in episode.turns] == [
        (True, [], True),
        (True, [], True),
        (True, ["Up"], True),
        (False, ["Left"], False),
        (True, [], True),
    ]
    assert episode.end == "" and not episode.failed, "the agent knew no further move"
    episode.turns[3].parts = {"environment": 2.0}
    rewards = Batch([episode]).rewards_BT()[0]
    assert rewards.sum() == episode.total_reward
    last_of_third = sum(len(turn.reply) for turn in episode.turns[:3]) - 1
    assert rewards[last_of_third] == episode.turns[2].reward + 2.0


async def test_a_step_that_is_repeated_is_played_once(server: ServerProcess, tmp_path: Path) -> None:
    program = """
ask(("user", "go"))
first = call(url + "/step", {"actions": ["Up"], "step_index": 0})
assert call(url + "/step", {"actions": ["Up"], "step_index": 0}) == first, "another result"
for wrong in ({"actions": ["Left"], "step_index": 0}, {"actions": ["Left"], "step_index": 5}):
    try:
        call(url + "/step", wrong)
    except urllib.error.HTTPError as error:
        assert error.code == 409
    else:
        raise SystemExit("not refused")
"""
    episode = await play(server, tmp_path, program)
    assert [turn.actions for turn in episode.turns] == [["Up"]] and not episode.failed, episode.error


async def test_a_program_that_fails_is_no_reward_of_0_and_a_full_context_an_end(
    server: ServerProcess, tmp_path: Path
) -> None:
    failed = await play(server, tmp_path, "ask(('user', 'go'))\nsys.exit('the disk is full')")
    assert failed.failed and "ended with status 1: the disk is full" in failed.error
    full = await play(server, tmp_path, PLAYS, lambda request, text: "Up", max_episode_tokens=200)
    assert full.end == "context" and full.turns and not full.failed


async def test_a_reply_past_the_limit_on_turns_is_refused_and_a_step_is_still_played(
    server: ServerProcess, tmp_path: Path
) -> None:
    """A program in a container needs a last step that has its work verified."""
    program = """
for number in range(20):
    try:
        ask(("user", str(number)))
    except urllib.error.HTTPError as error:
        assert (number, json.load(error)["error"]["code"]) == (12, "session_too_long")
        break
assert not call(url + "/step", {"actions": "Up"})["done"]
"""
    episode = await play(server, tmp_path, program)
    assert [(bool(turn.reply), turn.actions) for turn in episode.turns[-2:]] == [(True, []), (True, ["Up"])]
    assert (len(episode.turns), episode.end, episode.failed) == (12, "max_turns", False)
    endless = await play(server, tmp_path, "while True: ask(('user', str(os.urandom(8))))")
    assert (len(endless.turns), endless.end, endless.failed) == (12, "max_turns", False)


async def test_an_engine_that_fails_ends_the_run(server: ServerProcess, tmp_path: Path) -> None:
    def fail(request: Request, text: str) -> str:
        raise EngineError("the engine died")

    with pytest.raises(EngineError, match="the engine died"):
        await play(server, tmp_path, PLAYS, fail)


async def test_a_program_that_cannot_be_started_ends_the_run(server: ServerProcess, tmp_path: Path) -> None:
    async with collector(server, tmp_path, "") as (collecting, _):
        agents: ProgramAgents = collecting.agents
        agents.programs.config = ProgramConfig(command=("no-such-program",))
        with pytest.raises(AgentRefused, match="cannot be started"):
            await collecting.play_group(Start(0, 7), 1)


async def test_what_a_program_started_ends_with_its_episode(server: ServerProcess, tmp_path: Path) -> None:
    program = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
{PLAYS}
"""
    async with collector(server, tmp_path, program) as (collecting, _):
        await collecting.play_group(Start(0, 7), 1)
        agents: ProgramAgents = collecting.agents
        while agents.programs.ending:
            await asyncio.sleep(0.02)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_keys_of_other_episodes_are_refused(server: ServerProcess, tmp_path: Path) -> None:
    async with programs(ProgramConfig(command=("true",))) as wrap:
        template = Template(tokenizer("chatml"))
        engine = ScriptedEngine(template, lambda request, text: "x")
        agents = wrap(EngineAgents(engine=engine, template=template, prompt=PromptConfig(), sampling=SamplingConfig()))
        assert isinstance(agents, ProgramAgents)
        async with httpx.AsyncClient(base_url=agents.programs.url) as http:
            for path, status in (("/environment", 401), ("/v1/models", 200)):
                assert (await http.get(path, headers={"authorization": "Bearer another"})).status_code == status
            body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 401
