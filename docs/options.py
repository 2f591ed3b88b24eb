"""Writes the option tables of docs/environments.md from the options classes of the environments.

python -m docs.options
"""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from starpod.env_server import EnvironmentOptions
from starpod.environments.bandit import BanditOptions
from starpod.environments.countdown import CountdownOptions
from starpod.environments.frozen_lake import FrozenLakeOptions
from starpod.environments.sokoban import SokobanOptions
from starpod.environments.sudoku import SudokuOptions
from starpod.environments.webshop.shop.options import PRESETS, WebShopOptions
from starpod.trainer.commands.keys import kinds, show

PAGE = Path(__file__).with_name("environments.md")
MARKED = re.compile(r"(<!-- (?P<name>\w+), by docs/options.py -->\n).*?(\n<!-- end -->)", re.DOTALL)
OPTIONS: dict[str, type[EnvironmentOptions]] = {
    "bandit": BanditOptions,
    "countdown": CountdownOptions,
    "frozen_lake": FrozenLakeOptions,
    "sokoban": SokobanOptions,
    "sudoku": SudokuOptions,
    "webshop": WebShopOptions,
}


def page() -> str:
    """The page, its marked tables as the code has them."""
    tables = {name: table(options) for name, options in OPTIONS.items()} | {"presets": presets()}
    return MARKED.sub(lambda found: found[1] + tables[found["name"]] + found[3], PAGE.read_text(encoding="utf-8"))


def table(options: type[EnvironmentOptions]) -> str:
    """A row for each option."""
    rows = ["| Option | Values | Default | Meaning |", "|---|---|---|---|"]
    for name, field in options.model_fields.items():
        value = field.default.model_dump(mode="json") if isinstance(field.default, BaseModel) else field.default
        shown = " ".join(value.values()) if isinstance(value, dict) else value
        default = "none" if shown in (None, "") else f"`{show(shown)}`"
        rows.append(f"| `{name}` | {values(field)} | {default} | {field.description} |".replace("\n", " "))
    return "\n".join(rows)


def values(field: FieldInfo) -> str:
    """Describes the values of an option, except null: choices, a type, bounds."""
    union = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    told = " or ".join(_kind(each) for each in union if each is not type(None))
    bounds = {
        name: getattr(each, name) for each in field.metadata for name in ("ge", "gt", "le") if hasattr(each, name)
    }
    low = f"above {bounds['gt']:,}, " if "gt" in bounds else f"{bounds['ge']:,} " if "ge" in bounds else ""
    high = f"to {bounds['le']:,}" if "le" in bounds else "or more" if low else ""
    if told == "integer" and low:
        return low + high
    return f"{told}, {low}{high}" if low else told


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is tuple:
        return "list"
    is_object = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    mark = "`" if get_origin(annotation) is Literal else ""
    return "object" if is_object else ", ".join(f"{mark}{kind}{mark}" for kind in kinds(annotation))


def presets() -> str:
    """Table of the shop's presets: a column for each, a row for each option that one of them sets."""
    rows = [f"| Preset | {' | '.join(f'`{name}`' for name in PRESETS)} |", f"|---|{'---|' * len(PRESETS)}"]
    set_ = {preset: WebShopOptions.model_validate({"preset": preset}).model_dump(mode="json") for preset in PRESETS}
    for name in WebShopOptions.model_fields:
        if any(name in values for values in PRESETS.values()):
            rows.append(f"| `{name}` | {' | '.join(show(set_[preset][name]) for preset in PRESETS)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
