"""An agent with OpenAI's client, which knows nothing of training: it asks the model what to do, and does it.

The model is wherever OPENAI_BASE_URL says, the environment where STARPOD_ENVIRONMENT_URL does (docs/gateway.md):

    starpod train bandit 'collect.agent.command=[python, examples/openai_agent.py]'
"""

import json
import os
import re
import urllib.request
from typing import Any

from openai import OpenAI


def environment(path: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the environment shows, or what came of a step."""
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
