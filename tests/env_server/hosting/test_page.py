"""docs/hosting.md: every server that it starts can be hosted, and it names every setting and example id."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from starpod.cli.main import starpod
from starpod.env_server.hosting.families import add_hosted
from starpod.env_server.hosting.request import SHARED_SETTINGS
from starpod.env_server.registry import Registry
from tests.support import ROOT

TW_SIMPLE = ("--rewards", "dense", "--goal", "detailed")
PAGE = (ROOT / "docs" / "hosting.md").read_text()
FAMILIES = ("gymnasium", "openenv", "reasoning_gym", "skyrl_gym", "textarena", "textworld")


def commands() -> Iterator[list[str]]:
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line)


SERVED = [
    tuple(word.split(":", 1))
    for words in commands()
    if words[:2] == ["starpod", "serve"] or words[1:3] == ["starpod", "serve"]
    for word in words
    if word.partition(":")[0].replace("-", "_") in FAMILIES
]


@pytest.mark.parametrize(("family", "wanted"), SERVED)
def test_what_it_serves_can_be_hosted(
    family: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "minigrid" if wanted.startswith("minigrid:") else family.replace("-", "_")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-hosting")
    (row,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(row)["prompt"]
    for file in ("questions.jsonl", "facts.jsonl"):
        (tmp_path / file).write_text(row)
    monkeypatch.chdir(tmp_path)
    if family == "openenv":  # what the page has `openenv init` make
        subprocess.run([Path(sys.executable).with_name("openenv"), "init", wanted], check=True, capture_output=True)
        monkeypatch.syspath_prepend(tmp_path)
    if family == "textworld":
        make = Path(sys.executable).with_name("tw-make")
        game = tmp_path / wanted / "1.z8"
        subprocess.run([make, "tw-simple", *TW_SIMPLE, "--output", game], check=True, capture_output=True)
    id, *more = add_hosted(Registry(), f"{family}:{wanted}")
    assert bool(more) == ("*" in wanted)
    if not set("#?*") & set(wanted):
        assert f"`{id}`" in PAGE or id == "gymnasium-cart-pole-v1"


def test_its_other_commands_exist() -> None:
    others = [words[1:] for words in commands() if words[0] == "starpod" and words[1] != "serve"]
    assert {words[0] for words in others} == {"describe", "play", "check", "train", "hub"}
    for command, *words in others:
        told = CliRunner().invoke(starpod, [command, "--help"]).output
        assert all(word in told for word in words if word.startswith("--"))


@pytest.mark.minutes
def test_its_training_can_begin() -> None:
    (train,) = (words[1:] for words in commands() if words[:2] == ["starpod", "train"])
    pytest.importorskip("torch", reason="the trainer is not installed")
    dry = CliRunner().invoke(starpod, [*train, "--dry-run"])
    assert dry.exit_code == 0, dry.output


def test_it_names_every_setting() -> None:
    told = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Where sessions run")[0], re.MULTILINE)
    hosting = ROOT / "env_server/starpod/env_server/hosting"
    sources = [(hosting / f"{name}.py").read_text() for name in (*FAMILIES, "ors", "verifiers")]
    own = [
        setting
        for source in sources
        for setting in re.findall(r'"(\w+)"', source.split("HostingRequest.parse(", 1)[1].split("))", 1)[0])
    ]
    assert sorted(told) == sorted([*SHARED_SETTINGS, *own])
