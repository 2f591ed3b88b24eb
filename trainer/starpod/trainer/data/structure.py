"""Structures of replies as texts: xgrammar's structural tag as JSON, with the ids that may end the reply as `stop`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

MISSING = (
    "a structure of replies needs the package xgrammar; from a clone of the repository: pip install '.[structured]'"
)


def join(tag: Mapping[str, Any], stop: Iterable[int]) -> str:
    """Return a structural tag and the ids that may end a reply as a structure."""
    return json.dumps({**tag, "stop": sorted(stop)}, ensure_ascii=False)


def part(structure: str) -> tuple[str, list[int]]:
    """Return the structural tag as JSON, and the ids that may end a reply."""
    tag = json.loads(structure)
    stop = tag.pop("stop")
    return json.dumps(tag, ensure_ascii=False), stop
