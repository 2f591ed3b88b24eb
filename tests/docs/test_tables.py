"""The tables of README.md and of its pages say what the code has, and each figure names what measures it again."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.training.experiment import EXPERIMENTS, read_experiment
from starpod.env_server import Environment
from starpod.trainer.data.episode import Turn
from starpod.trainer.data.updates import ABOVE, BELOW, TRAINED
from starpod.v1 import environment_pb2 as pb
from tests.docs.pages import is_benchmark, is_there, pages, table, words
from tests.support import ROOT

ENVIRONMENTS = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = table(README.split("<!-- figures -->")[1].split("<!-- end of figures -->")[0], "What")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = PROJECT["entry-points"]["starpod.environments"]
EXTRAS = PROJECT["optional-dependencies"]
COUNTS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def environment(target: str) -> type[Environment]:
    """The class that an entry point names."""
    module, _, attribute = target.partition(" ")[0].partition(":")
    kind: type[Environment] = getattr(importlib.import_module(module), attribute)
    return kind


def test_the_table_of_environments_is_the_registry() -> None:
    rows = table(ENVIRONMENTS, "Environment")
    shown = {re.findall(r"^\[([\w-]+)\]", first)[0]: extras for first, _, extras in rows}
    assert shown == {
        name: ", ".join(target.partition(" ")[2].strip("[]").split(","))
        for name, target in sorted(ENTRY_POINTS.items())
    }


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_what_a_sentence_says_of_every_environment(name: str) -> None:
    spec = environment(ENTRY_POINTS[name]).spec
    assert (spec.id, spec.fork, spec.snapshot, spec.deterministic) == (name, True, True, True)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_every_option_of_an_environment_is_described(name: str) -> None:
    """The page leaves that to `starpod describe`."""
    options = environment(ENTRY_POINTS[name]).Options.model_fields
    assert [option for option, field in options.items() if not (field.description or "").strip()] == []


def test_every_extra_is_named() -> None:
    listed = [name for first, _ in table(README, "Extra") for name in re.findall(r"`(\w+)`", first)]
    for_developers = {"bench", "dev"}
    assert sorted(listed) == sorted(set(EXTRAS) - for_developers)


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: row[0])
def test_a_figure_names_the_command_that_measures_it(row: list[str]) -> None:
    what, measured, command = row
    assert what
    assert NUMBER.search(measured), "a figure has a number"
    called = words(command.strip("`"))
    if called[0] == "make":
        assert re.search(rf"^{called[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert called[:2] == ["python", "-m"]
    module = called[2].removeprefix("benchmarks.")
    assert is_benchmark(module)
    if module == "training.experiment":
        (experiment,) = called[3:]
        seeds = read_experiment(EXPERIMENTS[experiment]).seeds
        assert f"{COUNTS[seeds]} seed{'s' * (seeds != 1)}" in what


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: row[0])
def test_a_figure_of_the_readme_is_also_on_the_pages(row: list[str]) -> None:
    """A new measurement has to replace figures in README.md and in docs/benchmarks.md or its results."""
    sources: list[Path] = [page for page in pages() if page.name != "README.md"]
    numbers = {number for page in sources for number in NUMBER.findall(page.read_text(encoding="utf-8"))}
    assert [number for number in NUMBER.findall(row[1]) if number not in numbers] == []


def test_fields_of_episode_files_are_those_of_turns() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8").split("## Episode files")[1].split("\n## ")[0]
    told = {name for first, _ in table(page, "Field") for name in re.findall(r"`(\w+)`", first)}
    assert told == {"prompt", "fresh", "reply", "logprobs", "versions", "finish"} <= Turn(fresh=True).to_json().keys()
    marks = {name: int(value) for value, name in re.findall(r"(\d) (has a weight|clipped below|clipped above)", page)}
    assert marks == {"has a weight": TRAINED, "clipped below": BELOW, "clipped above": ABOVE}


def test_what_is_called_public_is_there() -> None:
    page = (ROOT / "docs" / "client.md").read_text(encoding="utf-8").split("## What is public")[1]
    pages = [
        (ROOT / "docs" / link).read_text(encoding="utf-8") for link in re.findall(r"\]\((reference/\w+.md)\)", page)
    ]
    told = re.findall(r"`(starpod[\w.]+)`", page) + re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    assert len(pages) == 3 and len(told) > 8 and [name for name in told if not is_there(name)] == []


def test_rust_names_messages_of_the_contract() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8").split("## 15. A server in Rust")[1]
    for message in (pb.StepRequest, pb.StepResponse):
        assert f"<{message.DESCRIPTOR.name}>" in page
    given = re.findall(r"\bturn\.(\w+)", page) + re.findall(r"(\w+): (?:Some|session)", page)
    known = {field.name for message in (pb.StepRequest, pb.StepResponse) for field in message.DESCRIPTOR.fields}
    assert {"epoch", "step_index", "transition"} <= set(given) <= known
    assert {f"ERROR_REASON_{each}" for each in re.findall(r'"([A-Z]+_[A-Z_]+)", "', page)} <= set(pb.ErrorReason.keys())


def test_variables_of_compose_exist() -> None:
    told = set(re.findall(r"STARPOD_[A-Z_]+", (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")))
    known = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("docker-compose*.yml"))
    assert told
    assert [name for name in sorted(told) if name not in known] == []
