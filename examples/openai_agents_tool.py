"""OpenAI's SDK for agents with a tool that plays the environment. It knows nothing of training, either.

Its package is openai-agents. For the model as it comes (docs/gateway.md):

    starpod train bandit_llm 'collect.agent.command=[python, examples/openai_agents_tool.py]' collect.agent.at_once=3 \\
      prompt.prefill=false warm_start.steps=0 sampling.max_episode_tokens=480
"""

import asyncio
import contextlib
import json
from typing import Any

import agents
from openai_agent import environment


@agents.function_tool
def act(action: str) -> str:
    """Plays an action."""
    return str(environment("/step", {"actions": [action]})["observation"])


def example(shown: str, action: str, came: str) -> list[Any]:
    """A conversation in which the tool was called: so small a model calls one where it can repeat a call."""
    call = {"type": "function_call", "call_id": action, "name": "act", "arguments": json.dumps({"action": action})}
    result = {"type": "function_call_output", "call_id": action, "output": came}
    return [{"role": "user", "content": shown}, call, result]


async def main() -> None:
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api("chat_completions")
    state = environment()
    player = agents.Agent(name="player", instructions=state["instructions"], tools=[act], model="policy")
    # MaxTurnsExceeded is how it ends: there is one turn. A model that calls nothing has played its episode, too.
    with contextlib.suppress(agents.AgentsException):
        told = [
            *example("Arms: Plumber, Gambler", "Plumber", "Plumber: 0.15 points"),
            *example("Arms: Clerk, Inventor", "Inventor", "Inventor: 1.0 points"),
            {"role": "user", "content": state["observation"]},
        ]
        await agents.Runner.run(player, told, max_turns=1)


if __name__ == "__main__":
    asyncio.run(main())
