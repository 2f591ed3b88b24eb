"""Training runs that pages show can begin: their configurations are sound, and fit the environment that they play."""

import re
from pathlib import Path

import pytest
import yaml

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import load_config
from tests.docs.pages import ADDRESS, blocks, name_of, pages
from tests.docs.test_commands import called
from tests.support import ROOT

COMES_WITH_IT = {path.stem for path in (ROOT / "trainer" / "starpod" / "trainer" / "configs").glob("*.yaml")}


def trainings(page: Path) -> list[list[str]]:
    """The configuration and the changes of each `starpod train` in a page's blocks."""
    shown = [call[1:] for call in called(page.read_text(encoding="utf-8"))[0] if call[:1] == ["train"]]
    bare = [re.sub(r"--(run-dir|imitate)\n\S+", "", "\n".join(call)).split("\n") for call in shown]
    calls = [[word for word in call if word and not word.startswith("--")] for call in bare]
    return [call or ["frozen_lake"] for call in calls]


def read(call: list[str], folder: Path) -> Config | None:
    """Return the configuration of a call, or None if it is a file of the reader that the page does not show."""
    name, *changes = call
    found = [path for path in (folder / name, ROOT / name) if path.exists()]
    if not found and name not in COMES_WITH_IT:
        return None
    return load_config(str(found[0]) if found else name, changes)


@pytest.mark.parametrize("page", [page for page in pages() if trainings(page)], ids=name_of)
def test_its_configurations_are_sound(page: Path, tmp_path: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if named := re.match(r"# (\S+\.yaml)\n", block.text):
            (tmp_path / named[1]).write_text(block.text)
    for call in trainings(page):
        if config := read(call, tmp_path):
            blind = {"walk", "careful"} & set(config.evaluation.reference)
            assert not blind or config.environment.options.get("observation") == "local", call


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*/*.yaml")), ids=name_of)
def test_an_example_trains_on_the_server_of_its_page(file: Path) -> None:
    assert ADDRESS in (file.parent / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["environment"]["addresses"] == [ADDRESS]
