"""Agents of others, unmodified: they play a lake through the gateway, and what they sampled is what is trained on.

Their packages are in the virtual environment of `make test-agents`.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.base import Request
from starpod.trainer.rollout.collect import Start
from tests.support import ServerProcess
from tests.tools.gateway.test_programs import EXAMPLE, collector

BEGIN = """
import asyncio, json, os, urllib.request
"""
PATH = ("Right", "Right", "Down", "Down", "Down", "Right")


def needs(package: str) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-agents")


def calls(name: str, arguments: Any) -> Any:
    """A model that thinks, calls a tool with the next action of a path, and says at last that it is done."""

    def say(request: Request, text: str) -> str:
        taken = text.count("<|im_start|>assistant") - 1
        if taken >= len(PATH):
            return "I am done."
        call = json.dumps({"name": name, "arguments": arguments(PATH[taken], taken)})
        return f"I go {PATH[taken]}.\n<tool_call>\n{call}\n</tool_call>"

    return say


async def play(server: ServerProcess, folder: Path, program: str, say: Any) -> tuple[Episode, list[Request]]:
    async with collector(server, folder, program, say, max_reply_tokens=600, max_episode_tokens=30_000) as (it, engine):
        group = await it.play_group(Start(3, 7), 1)
    (episode,) = group.members
    assert not episode.failed, episode.error
    return episode, engine.requests


def check(episode: Episode, requests: list[Request]) -> None:
    """Check that the model's actions were played in one growing conversation, whose ids are the sampled ones."""
    stepped = [turn for turn in episode.turns if turn.actions]
    assert [turn.actions[0] for turn in stepped] == list(PATH[: len(stepped)]) and stepped
    assert episode.end == "terminal"
    (sample,) = samples_of(episode)
    prompts = [request.prompt for request in requests if len(request.prompt) < len(sample.tokens)]
    assert all(sample.tokens[: len(prompt)] == prompt for prompt in prompts)


STEPS = """
def step(action):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    body = json.dumps({"actions": [action]}).encode()
    url = os.environ["STARPOD_ENVIRONMENT_URL"] + "/step"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
"""
ENDS = """
except Exception as error:
    assert "is over" in str(error), error
"""
"""How a program learns that its episode has ended."""


def openai_agent(
    given: str = 'state["observation"]',
    *,
    kind: str = "chat_completions",
    about: str = "Moves the player.",
    result: str = "json.dumps(step(to))",
    instructions: str = "Reach the goal.",
    settings: str = "",
    turns: int = 20,
) -> str:
    """A program of OpenAI Agents with a tool. given: what it begins with; result: of the tool; both as Python."""
    return f"""{BEGIN}{STEPS}
import agents

@agents.function_tool
def move(to: str) -> str:
    "{about}"
    return {result}

async def main():
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api("{kind}")
    settings = agents.ModelSettings({settings})
    agent = agents.Agent(
        name="player", instructions="{instructions}", tools=[move], model="policy", model_settings=settings
    )
    async for _ in agents.Runner.run_streamed(agent, {given}, max_turns={turns}).stream_events():
        pass

try:
    asyncio.run(main())
except agents.MaxTurnsExceeded:
    pass{ENDS}"""


@pytest.mark.parametrize("kind", ["chat_completions", "responses"])
async def test_openai_agents(server: ServerProcess, tmp_path: Path, kind: str) -> None:
    needs("openai-agents")
    check(*await play(server, tmp_path, openai_agent(kind=kind), calls("move", lambda to, index: {"to": to})))


async def test_the_example_with_a_tool(server: ServerProcess, tmp_path: Path) -> None:
    needs("openai-agents")
    program = EXAMPLE.replace("NAME", "openai_agents_tool.py")
    call = '<tool_call>\n{"name": "act", "arguments": {"action": "Right"}}\n</tool_call>'
    episode, requests = await play(server, tmp_path, program, lambda *_: call)
    assert [turn.actions for turn in episode.turns] == [["Right"]] and len(requests) == 1


OPENAI_AGENTS_MCP = f"""{BEGIN}
import agents
from agents.mcp import MCPServerStreamableHttp

async def main():
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api("chat_completions")
    headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    async with MCPServerStreamableHttp(params={{"url": os.environ["STARPOD_MCP_URL"], "headers": headers}}) as tools:
        agent = agents.Agent(name="player", instructions="Reach the goal.", mcp_servers=[tools], model="policy")
        await agents.Runner.run(agent, "Play.", max_turns=20)

try:
    asyncio.run(main()){ENDS}"""


async def test_openai_agents_with_the_environment_as_mcp_server(server: ServerProcess, tmp_path: Path) -> None:
    needs("openai-agents")
    say = calls("step", lambda to, index: {"actions": [to], "step_index": index})
    check(*await play(server, tmp_path, OPENAI_AGENTS_MCP, say))


ANTHROPIC = """
import anthropic

TOOL = {"name": "move", "description": "Moves.", "input_schema": {"type": "object"}}
llm = anthropic.Anthropic()
messages = [{"role": "user", "content": state["observation"]}]
while not state["done"]:
    with llm.messages.stream(model="policy", max_tokens=200, system="Play.", messages=messages, tools=[TOOL]) as stream:
        reply = stream.get_final_message()
    assert reply.stop_reason == "tool_use", reply
    messages.append({"role": "assistant", "content": reply.content})
    (use,) = [block for block in reply.content if block.type == "tool_use"]
    state = step(use.input["to"])
    result = {"type": "tool_result", "tool_use_id": use.id, "content": state["observation"]}
    messages.append({"role": "user", "content": [result]})
"""


async def test_anthropics_client(server: ServerProcess, tmp_path: Path) -> None:
    needs("anthropic")
    say = calls("move", lambda to, index: {"to": to})
    check(*await play(server, tmp_path, BEGIN + STEPS + ANTHROPIC, say))


MINI_SWE_AGENT = f"""{BEGIN}
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_SILENT_STARTUP"] = "1"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

kwargs = {{"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}}
model = LitellmModel(model_name="openai/policy", model_kwargs=kwargs)
texts = {{"system_template": "You act by commands.", "instance_template": "{{{{task}}}}"}}
task = "Play the environment at $STARPOD_ENVIRONMENT_URL with curl. " + state["instructions"]
try:
    DefaultAgent(model, LocalEnvironment(), step_limit=20, **texts).run(task){ENDS}"""


async def test_mini_swe_agent(server: ServerProcess, tmp_path: Path) -> None:
    needs("mini-swe-agent")

    def command(to: str, index: int) -> dict[str, str]:
        body = json.dumps({"actions": [to], "step_index": index})
        call = "curl -s -H 'content-type: application/json' -H \"authorization: Bearer $OPENAI_API_KEY\""
        return {"command": f"{call} -d '{body}' $STARPOD_ENVIRONMENT_URL/step"}

    check(*await play(server, tmp_path, MINI_SWE_AGENT, calls("bash", command)))


MCP = f"""{BEGIN}
from mcp.client.session import ClientSession
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

async def main():
    http = create_mcp_http_client(headers={{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
    async with http, streamable_http_client(os.environ["STARPOD_MCP_URL"], http_client=http) as (read, write, *_):
        async with ClientSession(read, write) as client:
            await client.initialize()
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == ["observe", "step"], names
            messages, index, done = [], 0, False
            while not done:
                seen = (await client.call_tool("observe", {{}})).structured_content
                messages.append(("user", seen["observation"]))
                text = ask(*messages)
                messages.append(("assistant", text))
                for _ in range(2):  # the second time it is a repetition
                    result = await client.call_tool("step", {{"actions": [text], "step_index": index}})
                    assert not result.is_error, result
                index, done = result.structured_content["step_index"], result.structured_content["done"]

asyncio.run(main())
"""


async def test_a_plain_client_of_mcp(server: ServerProcess, tmp_path: Path) -> None:
    needs("mcp")

    def say(request: Request, text: str) -> str:
        return PATH[text.count("<|im_start|>assistant") - 1]

    check(*await play(server, tmp_path, MCP, say))
