"""Ids, versions and what may be registered."""

import dataclasses
import importlib
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from starpod.env_server.authoring.environment import Environment, Unavailable
from starpod.env_server.episodes.errors import CallError
from starpod.env_server.registry import (
    ENTRY_POINT_GROUP,
    Registry,
    RegistryError,
    load_class,
    parse_version_range,
    reference_to,
)
from tests.env_server.troublesome import OldWalk, Walk
from tests.environments.episodes import start


def variant(**changes: Any) -> type[Environment]:
    return type("Variant", (Walk,), {"spec": dataclasses.replace(Walk.spec, **changes)})


def test_only_what_is_asked_for_is_imported() -> None:
    code = (
        "import sys; from starpod.env_server.registry import Registry\n"
        "print(*Registry.installed(['sudoku', 'bandit-v1']).ids, *(m for m in sys.modules if 'webshop' in m))\n"
        "print('sokoban-v1' in Registry.installed(['sudoku', 'nonesuch']).ids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "bandit-v1 sudoku-v1\nTrue\n"


COPIED = (
    *("bandit", "countdown", "desk", "frozen_lake", "game_2048", "house", "rubiks_cube", "search_qa", "sokoban"),
    *("sudoku", "tic_tac_toe", "word_problems"),
)


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_of_a_built_in_environment_is_an_environment_of_its_own(name: str, tmp_path: Path) -> None:
    original = importlib.import_module(f"starpod.environments.{name}")
    assert original.__file__ is not None
    copy = shutil.copytree(Path(original.__file__).parent, tmp_path / f"my_{name}")
    registry = Registry()
    registry.add_module(str(copy))
    (environment,) = registry
    assert environment.__module__ == f"starpod_environment_my_{name}.environment"
    assert load_class(reference_to(environment)).spec == environment.spec
    picture = start(getattr(original, environment.__qualname__)).environment.render("png")
    assert start(environment).environment.render("png") == picture
    loaded = [module for module in sys.modules if module.startswith(f"starpod_environment_my_{name}.")]
    assert len(loaded) == len(list(copy.glob("[!_]*.py")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "Walk-v1"}, "not of the form name-vN"),
        ({"id": "walk"}, "not of the form name-vN"),
        ({"id": "walk--far-v1"}, "not of the form name-vN"),
        ({"version": "1.0"}, "not MAJOR.MINOR.PATCH"),
        ({"restores": "latest"}, "not a comparator"),
        ({}, "registered twice"),
    ],
)
def test_bad_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    registry = Registry([Walk])
    with pytest.raises(RegistryError, match=message):
        registry.add(variant(**changes))


def test_a_name_selects_its_versions_and_no_longer_names() -> None:
    registry = Registry([Walk, OldWalk, variant(id="walk-far-v1"), variant(id="walk-v2")])
    assert registry.select(["walk"]).ids == ["walk-v1", "walk-v2"]
    assert registry.select(["walk-far"]).ids == registry.select(["walk-far-v1"]).ids == ["walk-far-v1"]


def test_an_incomplete_class_is_refused() -> None:
    class Incomplete(Environment):
        spec = Walk.spec

    with pytest.raises(RegistryError, match="does not define render, reset, step"):
        Registry([Incomplete])


def test_versions_are_ordered_by_number_not_by_text() -> None:
    registry = Registry([variant(version="1.9.0"), variant(version="1.10.0"), OldWalk])
    assert registry.find("walk-v1").spec.version == "1.10.0"
    assert registry.find("walk-v1", "<1.10").spec.version == "1.9.0"
    assert registry.find_restorer("walk-v1", "1.0.0") is OldWalk


def test_a_snapshot_goes_to_its_own_version_or_to_one_that_says_so() -> None:
    assert Registry([Walk, OldWalk]).find_restorer("walk-v1", "1.0.0") is OldWalk
    assert Registry([Walk]).find_restorer("walk-v1", "1.0.5") is Walk
    for version in ("2.0.0", "'; drop table"):
        with pytest.raises(CallError, match="INCOMPATIBLE_SNAPSHOT"):
            Registry([Walk]).find_restorer("walk-v1", version)


@pytest.mark.parametrize("text", ["~=1.0", "1.x", ">= <", "1.0;2.0", ">=1.0.0.0.0"])
def test_ranges_are_comparators_only(text: str) -> None:
    with pytest.raises(ValueError, match="not a comparator"):
        parse_version_range(text)


def test_environments_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    file.write_text(
        "from starpod.env_server import Environment, EnvironmentSpec, Outcome\n"
        "class Mine(Environment):\n"
        "    spec = EnvironmentSpec(id='mine-v1', version='0.1.0', title='Mine')\n"
        "    def reset(self, rng): pass\n"
        "    def step(self, action): return Outcome()\n"
        "    def render(self, mode='text'): return 'mine'\n"
    )
    registry = Registry()
    registry.add_module(str(file))
    (mine,) = registry
    assert load_class(reference_to(mine)).spec == mine.spec
    saved = file.stat()
    file.write_text(file.read_text().replace("title='Mine'", "title='Ours'"))
    os.utime(file, ns=(saved.st_atime_ns, saved.st_mtime_ns))  # saved twice within one tick of the clock
    assert load_class(reference_to(mine)).spec.title == "Ours"
    (namesake := tmp_path / "theirs" / "mine.py").parent.mkdir()
    namesake.write_text(file.read_text().replace("mine-v1", "theirs-v1"))
    registry.add_module(str(namesake))
    assert [load_class(reference_to(environment)).spec.id for environment in registry] == ["mine-v1", "theirs-v1"]
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(RegistryError, match="defines no Environment"):
        registry.add_module(str(tmp_path / "empty.py"))


class Lacking(Walk):
    """Can be hosted only where somebody has brought its data."""

    spec = dataclasses.replace(Walk.spec, id="lacking-v1")
    data = False
    prepared = 0

    @classmethod
    def prepare(cls) -> None:
        if not cls.data:
            raise Unavailable("no data; bring some")
        cls.prepared += 1


def test_what_cannot_be_hosted_is_left_out_unless_it_was_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry([Walk, Lacking])
    assert registry.prepare().ids == ["walk-v1"]
    (record,) = caplog.records
    assert record.getMessage() == "lacking-v1 cannot be served here: no data; bring some"
    with pytest.raises(RegistryError, match=r"lacking-v1 .* no data; bring some"):
        registry.select(["lacking"]).prepare(["lacking-v1"])
    monkeypatch.setattr(Lacking, "data", True)
    assert registry.prepare(registry.ids).ids == ["lacking-v1", "walk-v1"]
    assert Lacking.prepared == 1


BROKEN = """
import random, sys
from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Outcome
class Broken(Environment):
    spec = EnvironmentSpec(id="broken-v1", version="1.0.0", title="Broken")
    {member}
    def reset(self, rng): self.kinds = 2
    def step(self, action): return Outcome()
    def render(self, mode="text"): return "one"
"""


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        ("def instructions(self): return f'{self.kinds} kinds'", r"AttributeError: .*'kinds' \(mine.py, line 6\)"),
        ("def instructions(self): sys.exit(0)", r"SystemExit: 0 \(mine.py, line 6\)"),
        ("def instructions(self): return 5", r"Broken.instructions returned int, not str \(mine.py, line 6\)"),
        ("class Options(EnvironmentOptions): size: int", "ValidationError: 1 validation error for Options size Field"),
        ("prepare = classmethod(lambda cls: 1 / 0)", r"ZeroDivisionError: .* \(mine.py, line 6\)"),
    ],
)
def test_an_environment_that_cannot_describe_itself_is_not_served(
    member: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(BROKEN.replace("{member}", member))
    registry = Registry([Walk])
    registry.add_module(str(tmp_path / "mine.py"))
    with pytest.raises(RegistryError, match=rf"^broken-v1 cannot be served: .*{problem}"):
        registry.prepare(["broken-v1"])
    assert registry.prepare().ids == ["walk-v1"]
    assert re.search(problem, caplog.text)


def test_a_file_that_ends_the_program_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RegistryError, match=r"^mine\.py, line 2: SystemExit: 0"):
        Registry().add_module(str(tmp_path / "mine.py"))


def test_a_missing_package_of_an_extra_is_nobodys_mistake_until_it_is_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_one.py").write_text("import not_a_package.part")
    (tmp_path / "breaks.py").write_text("import starpod.no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        importlib.metadata.EntryPoint(f"{name}-v1", value, ENTRY_POINT_GROUP)
        for name, value in (
            ("needy", "needs_one:A [some,more]"),
            ("broken", "breaks:B [some]"),
            ("plain", "needs_one:C"),
        )
    ]
    monkeypatch.setattr("starpod.env_server.registry.entry_points", lambda group: found)
    with caplog.at_level(logging.INFO):
        registry = Registry.installed()
    assert [record.args[0] for record in caplog.records if record.args] == ["broken-v1", "plain-v1"]
    for name in ("needy", "needy-v1"):
        with pytest.raises(RegistryError, match="needy-v1 needs the package not_a_package; ") as refused:
            registry.select([name])
        assert str(refused.value).endswith("from a clone of the repository: pip install '.[some,more]'")
    with pytest.raises(RegistryError, match="unknown environment 'plain'"):
        registry.select(["plain"])
