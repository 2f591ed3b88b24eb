"""Keys of a training configuration that pages name exist; so do the pages that the code names."""

import re
from pathlib import Path

import pytest
import yaml

from starpod.trainer.commands.keys import own_value, sections
from starpod.trainer.configuration.config import Config
from tests.docs.pages import anchors, inline, name_of, pages, table
from tests.support import ROOT

KNOWN = {f"{prefix}.{name}".lstrip(".") for prefix, section in sections(Config()) for name, _ in section}
FREE = ("environment.options.", "evaluation.options.", "rewards.shaping.")
"""Mappings whose keys are not ours."""
FILES = (".md", ".proto", ".py", ".json", ".yaml", ".ts", ".cpp")


def named(text: str) -> set[str]:
    """Dotted keys in a page's inline code, without what is given to them."""
    tops = "|".join(Config.model_fields)
    pieces = (piece for code in inline(text) for piece in code.split())
    found = {match[1] for piece in pieces if (match := re.match(rf"((?:{tops})\.[a-z_.]+)(?:=|:?$)", piece))}
    return {key for key in found if not key.endswith(FILES) and not key.startswith(FREE)}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    assert named(page.read_text(encoding="utf-8")) - KNOWN == set()


def test_pages_name_keys() -> None:
    assert sum(len(named(page.read_text(encoding="utf-8"))) for page in pages()) > 60


def test_pages_that_the_code_names_exist() -> None:
    """Descriptions of keys and options, and messages, name pages as `docs/PAGE.md#HEADING`."""
    wrong, count = [], 0
    for folder in ("client", "env_server", "environments", "tools", "trainer"):
        for file in (ROOT / folder).rglob("*.py"):
            for page, _, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(#([\w-]+))?", file.read_text(encoding="utf-8")):
                count += 1
                path = ROOT / page
                if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
                    wrong.append(f"{file.relative_to(ROOT)}: {page}#{anchor}")
    assert wrong == []
    assert count > 10


def test_defaults_that_the_page_of_keys_names_are_the_codes() -> None:
    values = {
        f"{prefix}.{key}".lstrip("."): own_value(section, key)
        for prefix, section in sections(Config())
        for key, _ in section
    }
    compared = 0
    for first, default, _ in table((ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), "Key"):
        keys = re.findall(r"`([\w.]+)`", first)
        above = keys[0].rpartition(".")[0]
        told = default.replace("`", "").split(", ")
        for key, shown in zip(keys, told, strict=False):
            value = values[above + key if key.startswith(".") else key]
            if shown != "the environment's":
                compared += 1
                read = yaml.safe_load("null" if shown == "none" else shown.replace("1e-", "1.0e-"))
                assert (tuple(read) if isinstance(value, tuple) else read) == value, key
    assert compared > 20
