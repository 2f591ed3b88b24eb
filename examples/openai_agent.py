"""An agent with OpenAI's client that does not know about training: it asks a model for actions and plays them.

OPENAI_BASE_URL is the address of the model, and STARPOD_ENVIRONMENT_URL that of the environment (docs/gateway.md):

    starpod train bandit 'collect.agent.command=[python, examples/openai_agent.py]'
"""

import json
import os
import re
import urllib.request
from typing import Any

from openai import OpenAI


def environment(path: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of the environment. With a body, send it first, such as a step."""
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["STARPOD_ENVIRONMENT_URL"] + path, data, headers)
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))


def main() -> None:
    llm = OpenAI()
    state = environment()
    messages: list[Any] = []
    while not state["done"]:
        messages.append({"role": "user", "content": state["observation"]})
        text = llm.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        actions = re.findall(r"<answer>(.*?)</answer>", text)[:1]
        state = environment("/step", {"actions": actions, "step_index": state["step_index"]})


if __name__ == "__main__":
    main()
