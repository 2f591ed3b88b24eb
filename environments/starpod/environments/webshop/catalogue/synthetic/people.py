"""Human instructions: requests that a person would make when shown a product, in many phrasings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starpod.environments.webshop.catalogue.synthetic.kind import Attribute
from starpod.environments.webshop.catalogue.synthetic.wording import Random, a, pick, spoken

_OPENINGS = (
    "i am looking for {}",
    "i am looking for {}",
    "i need {}",
    "i want {}",
    "i would like {}",
    "i want to buy {}",
    "i'm looking for {}",
    "im looking for {}",
    "looking for {}",
    "find me {}",
    "show me {}",
    "can you find me {}",
    "please help me find {}",
    "i'd like to find {}",
    "get me {}",
    "i am in need of {}",
    "help me get {}",
    "i am interested in buying {}",
    "do you have {}",
    "my sister needs {}",
    "i need to order {}",
    "buy me {}",
)
_CLOSINGS = ("", "", "", "", " please", ", thanks", ".", ".", ".", ". it is a gift", ". i need it soon")
_SAID = {
    "Color": (
        " in {}",
        " in {}",
        " in the color {}",
        ", and i want the {} one",
        ", {} please",
        ". the color should be {}",
    ),
    "Size": (" in size {}", ", size {}", " that is {}", ". i need the size {}", " in a size {}"),
    "Flavor Name": (" in {} flavor", " with {} flavor", " that is {} flavored", ". {} flavor please"),
    "Scent": (" with {} scent", " that smells of {}", " in the {} scent"),
    "Style": (" in the {} style", ", style {}", ". pick the {} one"),
    "Fit Type": (" for {}", ", fit type {}"),
    "Item Package Quantity": (", {} of them", " in a pack of {}", ", quantity {}"),
}


def instruction(
    random: Random,
    brand: str,
    noun: str,
    attributes: Sequence[Attribute],
    options: Mapping[str, Sequence[str]],
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
            wanted += pick(random, _SAID[group]).format(value)
            chosen.append(value)
    text = pick(random, _OPENINGS).format(wanted) + pick(random, _CLOSINGS)
    return text, [each.text for each in asked], chosen


def human_record(
    random: Random,
    asin: str,
    brand: str,
    noun: str,
    attributes: Sequence[Attribute],
    options: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """An entry of items_human_ins.json."""
    text, asked, chosen = instruction(random, brand, noun, attributes, options)
    return {
        "asin": asin,
        "instruction": text,
        "attributes": [each.text for each in attributes],
        "options": [f"{group.lower()}: {value.lower()}" for group, values in options.items() for value in values],
        "instruction_attributes": asked,
        "instruction_options": chosen,
        "assignment_id": "",
        "worker_id": "",
    }
