"""Titles, sentences and instructions: how the words of a kind are put together."""

from __future__ import annotations

import random as randoms
from collections.abc import Callable, Sequence

from starpod.env_server.webshop.synthetic.kind import Attribute, Kind

Random = Callable[[], float]
"""Uniform over [0, 1): the one drawing function that is the same in every version of Python."""

_SPOKEN = {
    "machine wash": "machine washable",
    "hand wash": "hand washable",
    "wash cold": "safe to wash cold",
    "tumble dry": "safe to tumble dry",
    "plug play": "plug and play",
    "day comfort": "comfortable all day",
}
_POOL = 500
"""Sentences of a kind; texts draw from them."""

_SENTENCES = (
    "{This} {does}.",
    "{This} {does} and {does2}.",
    "It {does}, and it {does2}.",
    "Made of {made} and {made2}, it {does}.",
    "Great for {for_}: it {does}.",
    "Whether you need it for {for_} or for {for2}, {this} {does}.",
    "The package includes the {noun}, a {part} and a {part2}.",
    "The {part} and the {part2} are finished with {made}.",
    "Customers tell us that it {does}.",
    "Unlike other {query}, it {does}.",
    "With {has} and {made}, it {does}.",
    "Looking for {is_} {query}? {This} {does}.",
    "We chose {made} for the {part} after months of tests.",
    "A well-made {part} and {has}: small details that you notice every day.",
    "If anything is wrong with the {part}, write to us and we answer within 24 hours.",
    "Please allow for a slight difference in color because of light and screens.",
    "A thoughtful gift for birthdays, Christmas, Mother's Day or a new home.",
    "Questions about the {part}? Our team replaces or refunds without fuss.",
    "{Made} keeps the {part} looking new for a long time.",
    "We have made {query} for {years} years and still test each {noun} by hand.",
    "Suitable for {for_}, {for2} and much more.",
    "Compare the size chart and the pictures before you order.",
)
_HEADINGS = (
    "{head}: {sentence} ",
    "{HEAD} - {sentence} ",
    "\u3010{Head}\u3011{sentence} ",
    "{sentence} ",
    "{Head} \u2013 {sentence} ",
    "{sentence} ",
)
_ABOUT = {
    "is": (
        "{This} is {spoken} and {does}.",
        "A design that is {spoken} and {does}.",
        "Being {spoken}, it {does}.",
        "{Attribute} quality: it {does}.",
    ),
    "has": (
        "With {attribute}, it {does}.",
        "Thanks to {attribute}, {this} {does}.",
        "{Attribute} and a good {part} make the difference.",
        "It comes with {attribute} and {does}.",
    ),
    "for": (
        "Made for {attribute}: it {does}.",
        "Ideal for {attribute}; it {does}.",
        "Perfect for {attribute}, {this} {does}.",
        "Think of {attribute}: it {does}.",
    ),
}


def pick(random: Random, choices: Sequence[str]) -> str:
    return choices[int(random() * len(choices))]


def spoken(attribute: str) -> str:
    """How a person says an attribute: easy clean -> easy to clean."""
    first, _, rest = attribute.partition(" ")
    if first in ("easy", "ready"):
        return f"{first} to {rest}"
    return _SPOKEN.get(attribute, attribute)


def plural(noun: str) -> bool:
    return noun.endswith("s") and not noun.endswith(("ss", "canvas"))


def subject(kind: Kind, noun: str) -> str:
    """A singular subject for a noun: this lamp, this pair of pants."""
    if not plural(noun):
        return f"this {noun}"
    return f"this {'pair' if kind.category == 'fashion' else 'set'} of {noun}"


def a(noun: str) -> str:
    """The noun with its article."""
    if plural(noun):
        return noun
    return f"an {noun}" if noun[0] in "aeiou" or noun.startswith("HDMI") else f"a {noun}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def title(text: str) -> str:
    """Capitals as in a listing: small words stay small, marks such as HDMI stay as they are."""
    small = ("and", "for", "with", "of", "to", "on", "in", "the")
    return " ".join(word if word in small else capital(word) for word in text.split())


class Wording:
    """The sentences of one kind. They are put together once, from the kind alone, and drawn from after that."""

    def __init__(self, kind: Kind, number: int) -> None:
        random = randoms.Random(number).random
        self._kind = kind
        self.sentences = tuple(self._sentence(random, pick(random, _SENTENCES)) for _ in range(_POOL))
        self.bullets = tuple(
            self._headed(random, pick(random, kind.parts + kind.made), pick(random, self.sentences))
            for _ in range(_POOL)
        )
        self.about = {
            attribute: tuple(
                self._headed(random, attribute.text, self._sentence(random, template, attribute))
                for template in _ABOUT[attribute.role]
                for _ in range(6)
            )
            for attribute in kind.attributes
        }
        """Attribute -> bullets that speak of it."""

    def _sentence(self, random: Random, template: str, attribute: Attribute | None = None) -> str:
        kind = self._kind
        noun = pick(random, kind.nouns)
        this = subject(kind, noun)
        does, does2 = self._two(random, kind.does)
        made, made2 = self._two(random, kind.made)
        part, part2 = self._two(random, kind.parts)
        for_, for2 = self._two(random, [each.text for each in kind.attributes if each.role == "for"])
        said = attribute.text if attribute else ""
        return template.format(
            noun=noun,
            this=this,
            This=capital(this),
            does=does,
            does2=does2,
            made=made,
            made2=made2,
            Made=capital(made),
            part=part,
            part2=part2,
            for_=for_,
            for2=for2,
            is_=pick(random, [each.text for each in kind.attributes if each.role == "is"]),
            has=pick(random, [each.text for each in kind.attributes if each.role == "has"]),
            query=kind.query,
            years=int(5 + random() * 30),
            attribute=said,
            Attribute=capital(said),
            spoken=spoken(said),
        )

    def _headed(self, random: Random, heading: str, sentence: str) -> str:
        template = pick(random, _HEADINGS)
        return template.format(head=capital(heading), Head=title(heading), HEAD=heading.upper(), sentence=sentence)

    @staticmethod
    def _two(random: Random, choices: Sequence[str]) -> tuple[str, str]:
        """Two different ones."""
        first = int(random() * len(choices))
        second = (first + 1 + int(random() * (len(choices) - 1))) % len(choices)
        return choices[first], choices[second]
