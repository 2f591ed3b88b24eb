"""SKILL.md: what tools that load skills ask of its head, and its first steps as they are written there."""

import io
import re
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

from starpod.cli.main import main
from tests.docs.pages import blocks, words
from tests.support import ROOT

SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")


def test_its_head_is_that_of_a_skill() -> None:
    head = re.match(r"---\n(.*?)\n---\n", SKILL, re.DOTALL)
    assert head is not None
    values = yaml.safe_load(head[1])
    assert set(values) == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", values["name"])
    assert 0 < len(values["description"]) <= 1024
    assert len(SKILL.splitlines()) < 500


@pytest.mark.minutes
def test_its_first_environment_is_made_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["starpod"])
    (block,) = (each for each in blocks(SKILL) if "starpod new" in each.text)
    for command in block.commands[:3]:
        output = io.StringIO()
        with chdir(tmp_path), redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit) as exit_:
            main(words(command)[1:])
        assert not exit_.value.code, output.getvalue()
