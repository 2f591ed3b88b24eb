"""`starpod hub`: what it finds out about good and bad environments, and the pages that it writes."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from starpod.check import hub
from starpod.check.hub_pages import CheckedEnvironment
from starpod.check.runner import EnvironmentReport
from starpod.cli.main import starpod
from starpod.client import SyncFleet
from starpod.v1 import environment_pb2 as pb
from tests.support import ROOT, start_server
from tests.tools.check.planted import REWARDS, vault

GENEROUS = [("Turn the dial", "Turn <b>the</b> dial"), *REWARDS["any end is a success"][1]]
"""Changes of the vault of `starpod new`, whose page holds HTML then."""
TAKING = """
from dataclasses import replace

from starpod.env_server import Environment, EnvironmentSpec, Limits, Outcome, Tool, ToolCall


class Texts(Environment):
    spec = EnvironmentSpec(
        id="texts-v1", version="1.0.0", title="Texts", grammar="any text", limits=Limits(max_turns=3)
    )
    kind = str

    def reset(self, rng):
        self.taken = 0

    def step(self, action):
        if not isinstance(action, self.kind):
            return Outcome(valid=False)
        self.taken += 1
        return Outcome()

    def render(self, mode="text"):
        return f"{self.taken} taken"


class Calls(Texts):
    spec = replace(Texts.spec, id="calls-v1", grammar="", tools=(Tool("add", "Adds.", {"type": "object"}),))
    kind = ToolCall
"""


@pytest.mark.minutes
@pytest.mark.timeout(300)
def test_a_page_about_each_environment(tmp_path: Path) -> None:
    file, out = tmp_path / "generous.py", tmp_path / "pages"
    file.write_text(vault("generous-v1", GENEROUS))
    words = ["bandit", str(file)]
    done = CliRunner().invoke(starpod, ["hub", *words, "--out", str(out)])
    assert done.exit_code == 1, done.output
    assert "1 of 2 pass" in done.output
    assert "generous-v1: R-" in done.output
    found = {each["id"]: each for each in json.loads((out / "hub.json").read_text())}
    assert found["bandit-v1"]["passed"]
    assert not found["generous-v1"]["passed"]
    assert {each["status"] for each in found["generous-v1"]["contract"]} == {"passed", "skipped"}
    assert all(each["steps_per_second"] > 1 for each in found.values())
    index = (out / "index.html").read_text()
    assert all(f'href="{id}.html"' in index for id in found)
    about = (out / "generous-v1.html").read_text()
    assert "Turn &lt;b&gt;the&lt;/b&gt; dial" in about
    assert "It fails a check:</span> R-" in about


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    wrong = CliRunner().invoke(starpod, ["hub", "bandid", "--out", str(tmp_path / "out")])
    assert wrong.exit_code == 2 and "bandit" in wrong.output


def test_steps_are_counted_where_no_action_has_a_name(tmp_path: Path) -> None:
    file = tmp_path / "taking.py"
    file.write_text(TAKING)
    with start_server(str(file)) as server:
        rates = [asyncio.run(hub.measure(server.address, id_)) for id_ in ("texts-v1", "calls-v1")]
    assert all(rate is not None and rate > 1 for rate in rates)


def test_it_serves_what_it_lists() -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "hub", "bandit", "frozen_lake", "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as serving:
        try:
            assert serving.stdout is not None
            lines = [serving.stdout.readline() for _ in range(3)]
            with SyncFleet(lines[-1].split()[-1]) as fleet:
                served = [spec.id for spec in fleet.describe()]
        finally:
            serving.terminate()
    assert served == [line.split()[0] for line in lines[:2]] == ["bandit-v1", "frozen_lake-v1"]
    assert lines[-1].startswith("Serving 2 environments on 127.0.0.1:")


def test_servers_take_turns_also_with_one_that_starts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    ready: list[int] = []
    late = threading.Event()

    def start(words: Sequence[str]) -> list[hub.ServedEnvironment]:
        (family,) = words
        if family == "late":
            late.wait(60)
        return [("address", pb.EnvironmentSpec(id=f"{family}-{number}")) for number in range(6)]

    async def examine(address: str, spec: pb.EnvironmentSpec) -> CheckedEnvironment:
        checked.append(spec.id.partition("-")[0])
        if len(checked) == 4:
            late.set()
        while len(ready) < (2 if len(checked) < 4 else 3):
            await asyncio.sleep(0.001)
        nothing = EnvironmentReport(spec.id, "")
        return CheckedEnvironment(spec, address, nothing, nothing)

    def told(hosted: int = 0, entry: CheckedEnvironment | None = None) -> None:
        ready.extend([hosted] if hosted else [])

    monkeypatch.setattr(hub, "examine", examine)
    monkeypatch.setattr(hub, "AT_ONCE", 1)
    everything = [["one"], ["other"], ["late"]]
    asyncio.run(hub.check_all(everything, start, told, until=math.inf))
    assert Counter(checked[:4]) == {"one": 2, "other": 2}
    assert Counter(checked[4:13]) == {"one": 3, "other": 3, "late": 3}
    assert Counter(checked) == {"one": 6, "other": 6, "late": 6}


def test_the_environment_of_make_hub_has_what_our_own_environments_need() -> None:
    """All but a browser, which no package brings."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    extras = [re.findall(r"\[(.*)\]", each) for each in declared["starpod.environments"].values()]
    needed = {extra for found in extras if found for extra in found[0].split(",")} - {"browser"}
    recipe = (ROOT / "Makefile").read_text().split("\n$(HOSTING_READY):")[1].partition("\n\n")[0]
    (installed,) = re.findall(r"-e '\.\[(.*)\]'", recipe)
    assert needed <= set(installed.split(","))


def test_environments_without_enough_time_are_reported(tmp_path: Path) -> None:
    done = CliRunner().invoke(starpod, ["hub", "bandit", "--minutes", "0.00001", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "bandit-v1: not checked: out of time" in done.output
    (found,) = json.loads((tmp_path / "hub.json").read_text())
    assert (found["passed"], found["problem"]) == (False, "not checked: out of time")
