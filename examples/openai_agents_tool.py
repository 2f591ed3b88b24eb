"""An agent of OpenAI's SDK, with a tool that plays the environment. It does not know about training, either.

The SDK is the package openai-agents. To train a pretrained model without a warm start (docs/gateway.md):

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
    """Return a conversation with a call of the tool. So small a model only calls tools if it can copy a call."""
    call = {"type": "function_call", "call_id": action, "name": "act", "arguments": json.dumps({"action": action})}
    result = {"type": "function_call_output", "call_id": action, "output": came}
    return [{"role": "user", "content": shown}, call, result]


async def main() -> None:
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api("chat_completions")
    state = environment()
    player = agents.Agent(name="player", instructions=state["instructions"], tools=[act], model="policy")
    # There is only one turn, so the episode ends with MaxTurnsExceeded. It also ends if the model calls no tool.
    with contextlib.suppress(agents.AgentsException):
        messages = [
            *example("Arms: Plumber, Gambler", "Plumber", "Plumber: 0.15 points"),
            *example("Arms: Clerk, Inventor", "Inventor", "Inventor: 1.0 points"),
            {"role": "user", "content": state["observation"]},
        ]
        await agents.Runner.run(player, messages, max_turns=1)


if __name__ == "__main__":
    asyncio.run(main())
