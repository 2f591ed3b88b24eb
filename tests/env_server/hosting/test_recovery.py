"""The server of a hosted episode is killed: the episode goes on as if nothing had happened, or its loss is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from starpod.client import JSON, Action, ToolCall
from tests.env_server.hosting.checks import check_recovery
from tests.support import ServerProcess, start_server

COUNTER = "tests.env_server.hosting.openenv_environments:CounterEnvironment"


@dataclass(frozen=True)
class Family:
    """One package: how its environment is hosted and played.

    words: for `starpod serve`, given a folder and a stack for what must run beside it. actions: again and again; none:
    the expert's. unknown: also served, and not known to be deterministic.
    """

    module: str
    words: Callable[[Path, ExitStack], Sequence[str]]
    id: str
    actions: Sequence[Action] = ()
    unknown: str = ""


def textworld(folder: Path, stack: ExitStack) -> list[str]:
    size = ("--world-size", "2", "--nb-objects", "4", "--quest-length", "3")
    make = [Path(sys.executable).with_name("tw-make"), "custom", *size, "--seed", "1", "--output", folder / "game.z8"]
    subprocess.run(make, check=True, capture_output=True)
    return ["--textworld", f"{folder}#id=house-v1"]


def ors(folder: Path, stack: ExitStack) -> list[str]:
    service = stack.enter_context(
        closing(ServerProcess([sys.executable, "-m", "tests.env_server.hosting.ors_environments"]))
    )
    walk = f"http://{service.address}/walk"
    return ["--ors", f"{walk}#deterministic=yes", "--ors", f"{walk}#id=unknown-v1"]


def skyrl_gym(folder: Path, stack: ExitStack) -> list[str]:
    row = {"prompt": "2 + 3 = ?", "reward_spec": {"ground_truth": "5"}, "extra_info": {"max_turns": 4}}
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row))
    hosted = f"gsm8k_multi_turn#rows={rows}"
    return ["--skyrl-gym", f"{hosted}&deterministic=yes", "--skyrl-gym", f"{hosted}&id=unknown-v1"]


FAMILIES = {
    "gymnasium": Family(
        "gymnasium", lambda *_: ["--gymnasium", "FrozenLake-v1"], "gymnasium-frozen-lake-v1", ["0", "3"]
    ),
    "minigrid": Family(
        "minigrid",
        lambda *_: ["--gymnasium", "minigrid:BabyAI-GoToRedBall-v0"],
        "gymnasium-baby-ai-go-to-red-ball-v0",
        ["2", "1", "2"],
    ),
    "reasoning_gym": Family(
        "reasoning_gym", lambda *_: ["--reasoning-gym", "leg_counting"], "reasoning-leg_counting-v1"
    ),
    "textarena": Family(
        "textarena",
        lambda *_: ["--textarena", "2048-v0-mega-easy"],
        "textarena-2048-mega-easy-v0",
        ["[left]", "[up]", "[right]"],
    ),
    "textworld": Family("textworld", textworld, "house-v1"),
    "openenv": Family(
        "openenv.core",
        lambda *_: ["--openenv", f"{COUNTER}#deterministic=yes", "--openenv", f"{COUNTER}#id=unknown-v1"],
        "openenv-counter-v1",
        [JSON({"by": 2})],
        "unknown-v1",
    ),
    "ors": Family("openreward", ors, "ors-walk-v1", [ToolCall("walk", {"steps": 1})], "unknown-v1"),
    "skyrl_gym": Family(
        "skyrl_gym", skyrl_gym, "skyrl-gsm8k_multi_turn-v1", ["Hm.", "It is #### 4", "No: #### 5"], "unknown-v1"
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_killed_server_is_played_on_or_told(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    pytest.importorskip(family.module, reason=f"{family.module} is not installed: make test-hosting")
    with ExitStack() as stack:
        words = family.words(tmp_path, stack)
        server = stack.enter_context(start_server(*words))
        await check_recovery(server, family.id, family.actions, family.unknown)
