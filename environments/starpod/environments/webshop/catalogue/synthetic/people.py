"""Human instructions: requests that a person would make when shown a product, in many phrasings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .names import Random, pick
from .vocabulary import COMMON, Attribute
from .wording import a, spoken

_PEOPLE = COMMON["people"]


def instruction(
    random: Random, brand: str, noun: str, attributes: Sequence[Attribute], options: Mapping[str, Sequence[str]]
) -> tuple[str, list[str], list[str]]:
    """The text, and the attributes and option values that it asks for; at least one attribute, none without."""
    asked = [attributes[int(random() * len(attributes))]]
    for attribute in attributes:
        if attribute not in asked and random() < 0.35 and len(asked) < 4:
            asked.append(attribute)
    before = " ".join(each.text if random() < 0.6 else spoken(each.text) for each in asked if each.role == "is")
    wanted = f"{before} {noun}".lstrip()
    if random() < 0.08:
        wanted = f"{brand.lower()} {wanted}"
    wanted = a(wanted)
    for role, words in (("has", (" with ", " that has ", " made with ")), ("for", (" for ", " for my ", " good for "))):
        said = [each.text for each in asked if each.role == role]
        if said:
            wanted += pick(random, words) + " and ".join(said)
    chosen = []
    for group, values in options.items():
        if random() < 0.75:
            value = pick(random, values).strip().replace("/", " | ").lower()
            wanted += pick(random, _PEOPLE["options"][group]).format(value)
            chosen.append(value)
    text = pick(random, _PEOPLE["openings"]).format(wanted) + pick(random, _PEOPLE["closings"])
    return text, [each.text for each in asked], chosen


def human_record(
    asin: str,
    instruction: tuple[str, list[str], list[str]],
    attributes: list[str],
    options: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """An entry of items_human_ins.json. instruction: text, attributes and option values that are asked for."""
    text, asked, chosen = instruction
    return {
        "asin": asin,
        "instruction": text,
        "attributes": attributes,
        "options": [f"{group.lower()}: {value.lower()}" for group, values in options.items() for value in values],
        "instruction_attributes": asked,
        "instruction_options": chosen,
        "assignment_id": "",
        "worker_id": "",
    }
