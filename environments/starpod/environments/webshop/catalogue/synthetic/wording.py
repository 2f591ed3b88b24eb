"""Titles, sentences and instructions: how the words of a kind are put together."""

from __future__ import annotations

import functools
import math
import random as randoms
from collections.abc import Callable, Sequence

from starpod.environments.webshop.catalogue.synthetic.kind import Kind, split

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
POOL = 360
"""Sentences of a kind. Each template comes every so many sentences."""
_STEPS = tuple(step for step in range(1, POOL) if math.gcd(step, POOL) == 1)
"""Steps through the sentences that meet each template and each sentence once before any comes again."""

# In angle brackets: what is put in for each product, since it speaks of its own noun.
_SENTENCES = (
    "<This> {does}.",
    "<This> {does} and {does2}.",
    "It {does}, and it {does2}.",
    "It not only {does} but also {does2}.",
    "Great for {use}: it {does}.",
    "For {use} or for {use2}, <this> {does}.",
    "Customers tell us that it {does}.",
    "Unlike ordinary {query}, it {does}.",
    "With {made} and an honest {part}, it {does}.",
    "Looking for {query}? <This> {does}.",
    "A clever {part} and {made}: small details, noticed every day.",
    "If anything is wrong with the {part}, write to us and we answer within 24 hours.",
    "A thoughtful gift for birthdays, Christmas, Mother's Day or a new home.",
    "Full refund or replacement, no questions asked, should the {part} ever fail.",
    "Since {year} we have sold {query} to families, shops and studios.",
    "Suitable for {use}, {use2} and much more.",
    "Count on {made}, on {made2}, and on people who answer.",
    "From {use} to {use2}: {query} like this earned {score} percent five star reviews.",
)
# None of these is an attribute: what a text says that a product is, has or is for, it is.
_USES = {
    "beauty": split(
        "slow mornings, travel bags, busy weeks, a quiet evening, the bathroom shelf, mothers and daughters"
    ),
    "electronics": split(
        "work, play, long weekends, the whole family, music lovers, first-time buyers, a crowded desk"
    ),
    "garden": split("small flats, family houses, rented rooms, cottages, quiet corners, open plan homes, first homes"),
    "fashion": split("weekends, city trips, school runs, brunch with friends, warm days, cool nights, long evenings"),
    "grocery": split("breakfast, quick lunches, sharing, the pantry, hungry teenagers, unexpected guests, long drives"),
}
_DEPARTMENTS = {
    "beauty": (
        "A blend of {made} and {made2} that {does}.",
        "Test it on a small patch of skin first; keep away from eyes and from children.",
        "Use it two or three times a week and see how it {does}.",
        "{Made} and {made2} are known for their gentle care.",
        "No harsh chemicals, no animal testing: only {made}, {made2} and patience.",
        "The {part} is hygienic, fits in any bathroom cabinet and can be recycled.",
    ),
    "electronics": (
        "In the box: <a>, a {part}, a {part2}, a quick start guide and a card with a warranty of {score} weeks.",
        "The {part} and the {part2} are built from {made}.",
        "We chose {made} for the {part} after months of tests.",
        "Press and hold the button for three seconds to reset the {part}.",
        "Please check the model number of your device before ordering a {part}.",
        "Certified against overheating, short circuit and overvoltage; the {part} stays cool.",
    ),
    "garden": (
        "Each {part} is finished with {made}.",
        "{Made} keeps the {part} looking new for a long time.",
        "Please allow for a slight difference in color because of light and screens.",
        "All tools and clear instructions are included; attach the {part}, then the {part2}.",
        "{Made} and {made2} suit modern, farmhouse, rustic and Scandinavian rooms.",
        "Wipe the {part} with a dry cloth and keep it out of direct sun.",
    ),
    "fashion": (
        "Cut from {made} with a neat {part} and a flattering {part2}.",
        "Please compare the size chart first; if in doubt, take one size up.",
        "Color may differ slightly because of light and screens.",
        "{Made} feels soft against the skin and lets air through.",
        "The {part} is stitched twice, so that it holds after many washes.",
        "Pairs with denim, a blazer or whatever your closet holds; the {part} adds a quiet accent.",
    ),
    "grocery": (
        "Made with {made} and {made2}, and very little else.",
        "Store in a cool, dry place and enjoy within two weeks of opening.",
        "We buy our {made} from farms that we visit every spring.",
        "Allergy note: packed in a facility that also handles milk, soy, wheat and tree nuts.",
        "Open the {part}, pour some {made} over it and share.",
        "Recipes with {made} and {made2} are printed inside the {part}.",
    ),
}
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
        "{Attribute}, as one would expect of good {query}: it {does}.",
        "If you want {attribute} {query}, here is one choice that {does}.",
        "Tested to be {spoken}; moreover it {does}.",
        "Truly {spoken}: <this> {does}.",
    ),
    "has": (
        "With {attribute}, it {does}.",
        "Thanks to {attribute}, <this> {does}.",
        "{Attribute} and a good {part} make the difference.",
        "It comes with {attribute} and {does}.",
    ),
    "for": (
        "Made for {attribute}: it {does}.",
        "Ideal for {attribute}; it {does}.",
        "Perfect for {attribute}, <this> {does}.",
        "Think of {attribute}: it {does}.",
    ),
}


def pick(random: Random, choices: Sequence[str]) -> str:
    return choices[int(random() * len(choices))]


def spoken(attribute: str) -> str:
    """An attribute as a person says it: easy clean -> easy to clean."""
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


@functools.lru_cache(1 << 14)
def title(text: str) -> str:
    """Capitals as in a listing: small words stay small, marks such as HDMI stay as they are."""
    small = ("a", "an", "and", "at", "by", "de", "for", "from", "in", "of", "on", "or", "the", "to", "with")
    return " ".join(word if word in small else capital(word) for word in text.split())


class Wording:
    """The sentences of one kind. They are put together once, from the kind alone, and drawn from after that."""

    def __init__(self, kind: Kind, number: int) -> None:
        random = randoms.Random(number).random
        self._kind = kind
        templates = _SENTENCES + _DEPARTMENTS[kind.category]
        heads = kind.parts + kind.made
        self.sentences = tuple(self._sentence(random, templates[number % len(templates)]) for number in range(POOL))
        self.bullets = tuple(_headed(random, pick(random, heads), self._some(random)) for _ in range(POOL))
        self.about = {
            attribute: tuple(
                _headed(random, attribute.text, self._sentence(random, template, attribute.text))
                for template in _ABOUT[attribute.role]
                for _ in range(2)
            )
            for attribute in kind.attributes
        }
        """Attribute -> bullets that speak of it."""

    def text(self, random: Random, count: int) -> list[str]:
        """Different sentences of the kind, by different templates as long as there are."""
        first, step = int(random() * POOL), _STEPS[int(random() * len(_STEPS))]
        return [self.sentences[(first + step * place) % POOL] for place in range(count)]

    def _sentence(self, random: Random, template: str, attribute: str = "") -> str:
        kind = self._kind
        does, does2 = two(random, kind.does)
        made, made2 = two(random, kind.made)
        part, part2 = two(random, kind.parts)
        use, use2 = two(random, _USES[kind.category])
        return template.format(
            does=does,
            does2=does2,
            made=made,
            made2=made2,
            Made=capital(made),
            part=part,
            part2=part2,
            use=use,
            use2=use2,
            query=kind.query,
            year=int(1950 + random() * 70),
            score=int(70 + random() * 29),
            attribute=attribute,
            Attribute=capital(attribute),
            spoken=spoken(attribute),
        )

    def _some(self, random: Random) -> str:
        """One or two sentences."""
        first, second = two(random, self.sentences)
        return first if random() < 0.55 or first == second else f"{first} {second}"


def fill(text: str, kind: Kind, noun: str) -> str:
    """Puts the noun of a product into a text made of sentences and bullets."""
    if "<" not in text:
        return text
    this = subject(kind, noun)
    return text.replace("<this>", this).replace("<This>", capital(this)).replace("<noun>", noun).replace("<a>", a(noun))


def two(random: Random, choices: Sequence[str]) -> tuple[str, str]:
    """Two entries at different places."""
    first = int(random() * len(choices))
    second = (first + 1 + int(random() * (len(choices) - 1))) % len(choices)
    return choices[first], choices[second]


def _headed(random: Random, heading: str, sentence: str) -> str:
    """A bullet in one of the ways in which sellers write them, with the blank at its end that they have."""
    template = pick(random, _HEADINGS)
    return template.format(head=capital(heading), Head=title(heading), HEAD=heading.upper(), sentence=sentence)
