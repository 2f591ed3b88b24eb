"""Human instructions: requests that a person might write for a product, in many phrasings."""

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
    """Write an instruction. Returns the text, and the attributes (one to four) and option values that it asks for."""
    asked = [attributes[int(random() * len(attributes))]]
    for attribute in attributes:
        if attribute not in asked and random() < 0.35 and len(asked) < 4:
            asked.append(attribute)
    before = " ".join(one.text if random() < 0.6 else spoken(one.text) for one in asked if one.role == "is")
    wanted = f"{before} {noun}".lstrip()
    if random() < 0.08:
        wanted = f"{brand.lower()} {wanted}"
    wanted = a(wanted)
    for role, words in (("has", (" with ", " that has ", " made with ")), ("for", (" for ", " for my ", " good for "))):
        texts = [attribute.text for attribute in asked if attribute.role == role]
        if texts:
            wanted += pick(random, words) + " and ".join(texts)
    chosen = []
    for group, values in options.items():
        if random() < 0.75:
            value = pick(random, values).strip().replace("/", " | ").lower()
            wanted += pick(random, _PEOPLE["options"][group]).format(value)
            chosen.append(value)
    text = pick(random, _PEOPLE["openings"]).format(wanted) + pick(random, _PEOPLE["closings"])
    return text, [attribute.text for attribute in asked], chosen


def human_record(
    asin: str,
    instruction: tuple[str, list[str], list[str]],
    attributes: list[str],
    options: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return an entry of items_human_ins.json. `instruction` is the result of the function of that name."""
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
