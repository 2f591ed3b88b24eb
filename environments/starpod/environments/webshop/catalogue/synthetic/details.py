"""Details of a single product: its measures, its part numbers, and the stories that sellers tell."""

from __future__ import annotations

from starpod.environments.webshop.catalogue.synthetic.kind import Kind
from starpod.environments.webshop.catalogue.synthetic.names import code, common_name, small
from starpod.environments.webshop.catalogue.synthetic.wording import Random

_ANECDOTES = (
    "The {series} was drawn by {} {} in {}.",
    "{} {}, who runs our workshop in {}, signs every batch.",
    "Named after the village of {}, home of {} {} and of good {query}.",
    "As seen in the {} Review and in {} Weekly.",
    "Goes well with the {} {code} and the {} {code}.",
    "Also sold as {code}, {code}, {code} and {code}.",
    "Ships from {}; returns go to {} {} in {}.",
    "\u2605 {} edition, lot {code} of {code}, inspected by {} {}.",
)


def anecdotes(random: Random, query: str, series: str) -> list[str]:
    """A few sentences full of names and numbers that hardly any other product has; none for half of the products."""
    told: list[str] = []
    place = int(random() * len(_ANECDOTES))
    while random() < 0.6 and len(told) < len(_ANECDOTES):
        template = (
            _ANECDOTES[(place + len(told)) % len(_ANECDOTES)].replace("{series}", series).replace("{query}", query)
        )
        pieces = template.split("{")
        told.append(
            pieces[0]
            + "".join(
                (code(random) if piece.startswith("code") else common_name(random)) + piece.partition("}")[2]
                for piece in pieces[1:]
            )
        )
    return told


def figures(random: Random, kind: Kind, model: str) -> str:
    """The measures of a product of this kind."""
    if kind.category == "grocery":
        return (
            f"Per serving: {int(random() * 400)} calories, {random() * 30:.1f}g protein, {random() * 40:.1f}g "
            f"carbohydrates, {int(random() * 900)}mg sodium. Lot {model}."
        )
    if kind.category == "fashion":
        tall = 150 + int(random() * 45)
        if "Shoes \u203a" in kind.path:
            return f"Style {model}: heel {random() * 11:.1f}cm, insole {20 + random() * 10:.1f}cm, upper {tall // 9}cm."
        return (
            f"Style {model}: waist {60 + int(random() * 60)}cm, length {30 + random() * 110:.1f}cm; "
            f"our model is {tall}cm tall and weighs {tall - 110 + int(random() * 30)}kg."
        )
    if kind.category == "electronics" and random() < 0.6:
        fits = ", ".join(code(random) for _ in range(3 + int(random() * 9)))
        return f"Compatible with {common_name(random)} {fits}. Part number {model}."
    if kind.category == "beauty":
        return f"Net contents {random() * 500 + 5:.1f}ml, batch {model}, best before {2026 + int(random() * 5)}."
    inches, pounds = (70, 90) if kind.category == "garden" else (12, 9)
    return (
        f"Item {model} measures {random() * inches + 1:.1f} x {random() * inches / 2 + 1:.1f} x "
        f"{random() * inches / 3 + 0.5:.1f} inches and weighs {small(random) * pounds + 0.1:.2f} pounds."
    )
