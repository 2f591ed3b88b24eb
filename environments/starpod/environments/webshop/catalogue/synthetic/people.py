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
    features = [attributes[int(random() * len(attributes))]]
    for attribute in attributes:
        if attribute not in features and random() < 0.35 and len(features) < 4:
            features.append(attribute)
    prefix = " ".join(one.text if random() < 0.6 else spoken(one.text) for one in features if one.role == "is")
    phrase = f"{prefix} {noun}".lstrip()
    if random() < 0.08:
        phrase = f"{brand.lower()} {phrase}"
    phrase = a(phrase)
    for role, links in (("has", (" with ", " that has ", " made with ")), ("for", (" for ", " for my ", " good for "))):
        texts = [attribute.text for attribute in features if attribute.role == role]
        if texts:
            phrase += pick(random, links) + " and ".join(texts)
    choices = []
    for group, values in options.items():
        if random() < 0.75:
            value = pick(random, values).strip().replace("/", " | ").lower()
            phrase += pick(random, _PEOPLE["options"][group]).format(value)
            choices.append(value)
    text = pick(random, _PEOPLE["openings"]).format(phrase) + pick(random, _PEOPLE["closings"])
    return text, [attribute.text for attribute in features], choices


def human_record(
    asin: str,
    instruction: tuple[str, list[str], list[str]],
    attributes: list[str],
    options: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return an entry of items_human_ins.json. The argument `instruction` is a result of the function `instruction`."""
    text, features, choices = instruction
    return {
        "asin": asin,
        "instruction": text,
        "attributes": attributes,
        "options": [f"{group.lower()}: {value.lower()}" for group, values in options.items() for value in values],
        "instruction_attributes": features,
        "instruction_options": choices,
        "assignment_id": "",
        "worker_id": "",
    }
