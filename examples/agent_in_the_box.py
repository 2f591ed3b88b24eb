"""A program plays a task from inside the task's container. docs/machines.md shows how to start this.

In the command, $TASK is the instruction. A trainer starts this per episode. Alone, it needs a standing gateway:

    python examples/agent_in_the_box.py --environment 127.0.0.1:50051/harbor-hello-v1 --gateway http://127.0.0.1:8100 \\
      'mini -y --exit-immediately -m openai/policy -t "$TASK"'
"""

import argparse
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

State = dict[str, Any]
WAIT = """for _ in $(seq 60); do [ -e /tmp/agent.status ] && break; sleep 1; done
tail -c 2000 /tmp/agent.log; echo
# After these refusals of the gateway, the work until then counts.
grep -qE 'context_length_exceeded|session_too_long' /tmp/agent.log && echo full || echo -
cat /tmp/agent.status 2>/dev/null"""
"""Waits for a minute, because a command may not take long, and shows at the end the program's exit status, if any."""


def call(url: str, key: str, body: State | None = None) -> State:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
        return dict(json.load(reply))


def play(step: Callable[[str], State], task: str, command: str, url: str, key: str) -> State:
    """Run the program in the container until it ends, have its work verified, and return the last state."""
    inside = f"http://127.0.0.1:{urlsplit(url).port}"
    variables = {"OPENAI_BASE_URL": f"{inside}/v1", "ANTHROPIC_BASE_URL": inside, "TASK": task}
    variables |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key)
    exports = " ".join(f"{name}={quote(value)}" for name, value in variables.items())
    run = f"( export {exports}\n{command}\n) >/tmp/agent.log 2>&1 </dev/null; echo $? >/tmp/agent.status"
    state = step(f"{{ {run}; }} &\n{WAIT}")
    while not state["done"] and not state["observation"].endswith("[exit status 0]"):
        state = step(WAIT)
    if state["done"]:  # a limit of the task
        return state
    *log, refusal, status = state["observation"].removesuffix("\n[exit status 0]").splitlines()
    if status != "0" and refusal != "full":  # no reward of 0: the episode is left out
        sys.exit(f"the program ended with status {status}: {' '.join(log)[-300:]}")
    return step("done")


def play_alone(environment: str, gateway: str, token: str, command: str) -> None:
    """Play an episode that a standing gateway records, with the reward of the task's verifier."""
    from starpod.client import SyncFleet

    address, _, name = environment.rpartition("/")
    with SyncFleet(address) as fleet:
        (session,) = fleet.open(name)
        record = call(f"{gateway}/sessions", token, {"environment": name})

        def step(text: str) -> State:
            last = session.step(text)
            return {"observation": last.observation.text, "done": session.done, "last": last}

        last = play(step, session.observation.text, command, gateway, record["api_key"])["last"]
        call(f"{gateway}/sessions/{record['name']}/reward", token, {"value": last.reward, "key": "verifier"})
        print(call(f"{gateway}/sessions/{record['name']}/end", token, {"success": bool(last.success)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--environment", "--gateway", "--gateway-token", "command"):
        parser.add_argument(option, default="")
    options = parser.parse_args()
    if url := os.environ.get("STARPOD_ENVIRONMENT_URL"):
        own = os.environ["OPENAI_API_KEY"]
        task = call(url, own)["observation"]
        play(lambda text: call(f"{url}/step", own, {"actions": [text]}), task, options.command, url, own)
    else:
        play_alone(options.environment, options.gateway, options.gateway_token, options.command)
