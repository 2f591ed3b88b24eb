"""docs/configuration.md is what the code says."""

from docs import configuration
from starpod.trainer.config import Config
from starpod.trainer.section import Section


def keys(section: Section, prefix: str = "") -> list[str]:
    """Dotted, of everything that can be set."""
    found = []
    for name, value in section:
        found += keys(value, f"{prefix}{name}.") if isinstance(value, Section) else [prefix + name]
    return found


def test_page_is_fresh() -> None:
    assert configuration.PAGE.read_text(encoding="utf-8") == configuration.page(), "run: python docs/configuration.py"


def test_every_key_is_explained() -> None:
    section = ""
    found: dict[str, list[str]] = {}
    for line in configuration.page().splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("| `"):
            key, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            found[key.strip("`") if section == "Top level" else f"{section}.{key.strip('`')}"] = cells
    assert sorted(found) == sorted(keys(Config()))
    assert all(len(cells) == 2 and all(cells) for cells in found.values())
