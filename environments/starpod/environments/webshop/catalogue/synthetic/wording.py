"""Titles, sentences and instructions, made of the words of a kind."""

from __future__ import annotations

import functools
import math
import random as randoms
import re

from .names import Random, code, common_name, pick, small, two
from .vocabulary import COMMON, Kind

_TEXTS = COMMON["texts"]

POOL = 360
"""Number of sentences that are made for each kind of product. They use the templates in turn."""
_STEPS = tuple(step for step in range(1, POOL) if math.gcd(step, POOL) == 1)
"""Step sizes that visit every sentence once before any of them repeats."""


def spoken(attribute: str) -> str:
    """Return an attribute as a person would say it: easy clean -> easy to clean."""
    word, _, remainder = attribute.partition(" ")
    if word in ("easy", "ready"):
        return f"{word} to {remainder}"
    return str(COMMON["spoken"].get(attribute, attribute))


def plural(noun: str) -> bool:
    return noun.endswith("s") and not noun.endswith(("ss", "canvas"))


def a(noun: str) -> str:
    """Return the noun with its article."""
    if plural(noun):
        return noun
    return f"an {noun}" if noun[0] in "aeiou" or noun.startswith("HDMI") else f"a {noun}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@functools.lru_cache(1 << 14)
def title(text: str) -> str:
    """Capitalise the words of a title. Minor words, and words such as HDMI, are unchanged."""
    minor = ("a", "an", "and", "at", "by", "de", "for", "from", "in", "of", "on", "or", "the", "to", "with")
    return " ".join(word if word in minor else capital(word) for word in text.split())


class Wording:
    """The sentences of one kind. They are made once and depend only on the kind; products draw from them."""

    def __init__(self, kind: Kind, number: int) -> None:
        random = randoms.Random(number).random
        self._kind = kind
        templates = (*_TEXTS["sentences"], *kind.sentences)
        heads = kind.parts + kind.made
        self.sentences = tuple(self._sentence(random, templates[number % len(templates)]) for number in range(POOL))
        self.bullets = tuple(_headed(random, pick(random, heads), self._some(random)) for _ in range(POOL))
        self.about = {
            attribute: tuple(
                _headed(random, attribute.text, self._sentence(random, template, attribute.text))
                for template in COMMON["about"][attribute.role]
                for _ in range(2)
            )
            for attribute in kind.attributes
        }
        """Bullets about each attribute."""

    def text(self, random: Random, count: int) -> list[str]:
        """Draw `count` different sentences. Templates repeat only after all of them were used."""
        start, step = int(random() * POOL), _STEPS[int(random() * len(_STEPS))]
        return [self.sentences[(start + step * index) % POOL] for index in range(count)]

    def _sentence(self, random: Random, template: str, attribute: str = "") -> str:
        kind = self._kind
        words = {}
        for name, choices in (("does", kind.does), ("made", kind.made), ("part", kind.parts), ("use", kind.uses)):
            words[name], words[f"{name}2"] = two(random, choices)
        return template.format(
            **words,
            Made=capital(words["made"]),
            query=kind.query,
            year=int(1950 + random() * 70),
            score=int(70 + random() * 29),
            attribute=attribute,
            Attribute=capital(attribute),
            spoken=spoken(attribute),
        )

    def _some(self, random: Random) -> str:
        first, second = two(random, self.sentences)
        return first if random() < 0.55 or first == second else f"{first} {second}"


def fill(text: str, kind: Kind, noun: str) -> str:
    """Insert the noun of a product into a text: this lamp, this pair of pants."""
    if "<" not in text:
        return text
    this = f"this {'pair' if kind.category == 'fashion' else 'set'} of {noun}" if plural(noun) else f"this {noun}"
    return text.replace("<this>", this).replace("<This>", capital(this)).replace("<a>", a(noun))


def _headed(random: Random, heading: str, sentence: str) -> str:
    """Return a bullet with a heading, in one of the formats that sellers use."""
    template = pick(random, _TEXTS["headings"])
    return template.format(head=capital(heading), Head=title(heading), HEAD=heading.upper(), sentence=sentence)


def anecdotes(random: Random, query: str, series: str) -> list[str]:
    """Write a few sentences with rare names and numbers, so that the text is unique; none for 40 % of the products."""
    templates, sentences = _TEXTS["anecdotes"], list[str]()
    start = int(random() * len(templates))
    while random() < 0.6 and len(sentences) < len(templates):
        template = templates[(start + len(sentences)) % len(templates)]
        template = template.replace("{series}", series).replace("{query}", query)
        sentences.append(re.sub("{(code)?}", lambda gap: code(random) if gap[1] else common_name(random), template))
    return sentences


def figures(random: Random, kind: Kind, model: str) -> str:
    """Write a sentence with the measurements of a product of this kind."""
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
        models = ", ".join(code(random) for _ in range(3 + int(random() * 9)))
        return f"Compatible with {common_name(random)} {models}. Part number {model}."
    if kind.category == "beauty":
        return f"Net contents {random() * 500 + 5:.1f}ml, batch {model}, best before {2026 + int(random() * 5)}."
    inches, pounds = (70, 90) if kind.category == "garden" else (12, 9)
    return (
        f"Item {model} measures {random() * inches + 1:.1f} x {random() * inches / 2 + 1:.1f} x "
        f"{random() * inches / 3 + 0.5:.1f} inches and weighs {small(random) * pounds + 0.1:.2f} pounds."
    )
