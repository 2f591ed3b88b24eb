"""The structure of the source: which component imports which, no circle of files, and what the console script names.

`lint-imports` enforces the contracts of pyproject.toml; these tests show that the contracts say all that they should.
"""

import ast
import importlib
import tomllib
from functools import cache
from typing import Any

import click
import grimp
import pytest

from starpod.cli.main import SUBCOMMANDS
from tests.docs.pages import is_there
from tests.support import ROOT

TOOLS = {"v1", "serving", "client", "remote", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    "v1": set(),
    "client": {"v1", "serving"},
    "env_server": {"v1", "serving"},
    "environments": {"v1", "serving", "env_server", "report"},
    "trainer": TOOLS,
    "cli": TOOLS,
    "check": TOOLS,
    "load": TOOLS,
    "remote": {"v1", "serving", "client"},
    "report": set(),
    "serving": set(),
    "ui": {*TOOLS, "trainer"},
    "gateway": {*TOOLS, "trainer"},
    "boards": {*TOOLS, "trainer"},
}
"""What each component may import. `cli` names the others lazily."""


@cache
def _components() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in ROOT.glob("*/starpod/*") if path.is_dir() and any(path.glob("*.py"))))


@cache
def _imports() -> dict[str, set[str]]:
    """The modules that each module imports, within functions and for type checking too."""
    graph = grimp.build_graph(*(f"starpod.{name}" for name in _components()), cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or in a round (strongly connected components)."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen: set[str] = set()
        waiting = list(imports[module])
        while waiting:
            if (other := waiting.pop()) not in seen:
                seen.add(other)
                waiting += imports.get(other, ())
        reached[module] = seen
    found = {
        frozenset({module, *(other for other in seen if module in reached.get(other, ()))})
        for module, seen in reached.items()
        if module in seen
    }
    return [set(circle) for circle in sorted(found, key=sorted)]


def test_circles_are_found() -> None:
    rounds = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}, "f": {"f"}}
    assert circles(rounds) == [{"a", "b", "c"}, {"f"}]


def test_no_circle_of_files() -> None:
    assert circles(_imports()) == []


def _names_from_starpod() -> list[tuple[str, str, str]]:
    """Return the names that benchmarks and examples import from the product, as (file, module, name)."""
    files = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    return [
        (str(path.relative_to(ROOT)), node.module, alias.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("starpod.") and node.module
        for alias in node.names
    ]


def test_what_benchmarks_and_examples_import_is_there() -> None:
    """Most of these programs are run by hand, and some need packages that are not installed here."""
    names = _names_from_starpod()
    assert len(names) > 50
    missing = [f"{file}: {module}.{name}" for file, module, name in names if not is_there(module, name)]
    assert missing == []


def _pyproject() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_every_component_is_in_the_table_and_checked_and_typed() -> None:
    tools = _pyproject()
    assert set(_components()) <= set(MAY_IMPORT)
    assert {f"starpod.{name}" for name in _components()} == set(tools["importlinter"]["root_packages"]) - {"tests"}
    assert {f"starpod.{name}" for name in _components()} == set(tools["mypy"]["packages"])


@pytest.mark.parametrize("component", _components())
def test_a_contract_forbids_what_a_component_may_not_import(component: str) -> None:
    forbidden = {
        module.removeprefix("starpod.")
        for contract in _pyproject()["importlinter"]["contracts"]
        if f"starpod.{component}" in contract.get("source_modules", ()) and not contract.get("allow_indirect_imports")
        for module in contract["forbidden_modules"]
    }
    assert forbidden == set(_components()) - MAY_IMPORT[component] - {component}


@pytest.mark.parametrize(("name", "subcommand"), SUBCOMMANDS.items(), ids=SUBCOMMANDS)
def test_what_the_console_script_names_exists(name: str, subcommand: Any) -> None:
    assert subcommand.module.split(".")[1] in MAY_IMPORT
    assert isinstance(getattr(importlib.import_module(subcommand.module), subcommand.attribute), click.Command)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not subcommand.extra or set(subcommand.extra.split(",")) <= set(extras)


def test_the_console_script_imports_no_component_that_it_names() -> None:
    named = {".".join(subcommand.module.split(".")[:2]) for subcommand in SUBCOMMANDS.values()} - {"starpod.cli"}
    imported = {other for module, others in _imports().items() if module.startswith("starpod.cli") for other in others}
    assert not [other for other in imported if other.startswith(tuple(f"{component}." for component in named))]
