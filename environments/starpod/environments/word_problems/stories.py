"""Generation of word problems: a story, a question, and the calculations that answer it, in order.

A story is a chain of events, each of which changes a person's number of items. All quantities are positive integers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

Step = tuple[str, int]
"""A calculation and its result."""

_PEOPLE = (
    *(("Mia", "she", "her"), ("Omar", "he", "his"), ("Lena", "she", "her"), ("Jack", "he", "his")),
    *(("Aisha", "she", "her"), ("Tom", "he", "his"), ("Yuki", "she", "her"), ("Diego", "he", "his")),
    *(("Nora", "she", "her"), ("Samir", "he", "his"), ("Ines", "she", "her"), ("Paul", "he", "his")),
)
_ITEMS = (
    *(("apples", "bags"), ("marbles", "boxes"), ("stickers", "packs"), ("pencils", "packs"), ("shells", "buckets")),
    *(("cards", "decks"), ("cookies", "trays"), ("beads", "jars"), ("coins", "rolls"), ("tomatoes", "crates")),
)
_FAMILY = ("sister", "brother", "uncle", "grandmother", "neighbour", "teacher")
_ASIDES = (
    "{name} is {n} years old.",
    "It is {n} minutes past nine.",
    "The walk home takes {n} minutes.",
    "A bus with {n} seats drives past.",
    "{name} lives at number {n} of a quiet street.",
    "The room is {n} degrees warm.",
)


class Problem(NamedTuple):
    """A word problem. The result of the last step is the answer."""

    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1][1]


class _Story:
    """A story to which events are added."""

    def __init__(self, rng: random.Random, largest: int) -> None:
        self.rng = rng
        self.largest = largest
        (self.name, self.they, self.their), (self.friend, _, _) = rng.sample(_PEOPLE, 2)
        self.items, self.packs = rng.choice(_ITEMS)
        self.has = rng.randint(2, largest)
        self.sentences = [f"{self.name} has {self.has} {self.items}."]
        self.steps: list[Step] = []

    @property
    def who(self) -> str:
        """The person's name or pronoun, at random."""
        return self.rng.choice((self.name, self.they.capitalize()))

    def tell(self, sentence: str, *steps: Step) -> None:
        """Add an event. The result of the last step is the person's new number of items."""
        self.sentences.append(sentence)
        self.steps += steps
        self.has = steps[-1][1]


# Each event adds as many steps as its key in _EVENTS says, or returns False if it does not fit the story.


def _find(story: _Story) -> bool:
    count = story.rng.randint(2, story.largest)
    verb = story.rng.choice((f"{story.who} finds", f"{story.friend} gives {story.name}", f"{story.who} buys"))
    story.tell(f"{verb} {count} more {story.items}.", (f"{story.has} + {count}", story.has + count))
    return True


def _give(story: _Story) -> bool:
    if story.has < 4:
        return False
    count = story.rng.randint(2, min(story.has - 1, story.largest))
    end = story.rng.choice((f"gives {count} of them to {story.friend}", f"loses {count} of them"))
    story.tell(f"Then {story.name} {end}.", (f"{story.has} - {count}", story.has - count))
    return True


def _double(story: _Story) -> bool:
    times = story.rng.choice((2, 3))
    if story.has * times > 10 * story.largest:
        return False
    word = {2: "twice", 3: "three times"}[times]
    story.tell(
        f"A week later {story.name} has {word} as many {story.items} as before.",
        (f"{story.has} * {times}", story.has * times),
    )
    return True


def _split(story: _Story) -> bool:
    parts = [parts for parts in range(2, 10) if story.has % parts == 0 and story.has > parts]
    if not parts:
        return False
    part = story.rng.choice(parts)
    story.tell(
        f"{story.who} shares all {story.items} equally among {part} people, {story.name} being one of them, and from "
        "then on has only that share.",
        (f"{story.has} / {part}", story.has // part),
    )
    return True


def _packs(story: _Story) -> bool:
    packs, size = story.rng.randint(2, 9), story.rng.randint(2, 12)
    story.tell(
        f"{story.their.capitalize()} {story.rng.choice(_FAMILY)} brings {packs} {story.packs} of {size} {story.items} "
        f"each, all for {story.name}.",
        (f"{packs} * {size}", packs * size),
        (f"{story.has} + {packs * size}", story.has + packs * size),
    )
    return True


def _guests(story: _Story) -> bool:
    share = story.rng.randint(2, 5)
    limit = min(12, (story.has - 1) // share)
    if limit < 2:
        return False
    guests = story.rng.randint(2, limit)
    story.tell(
        f"{story.who} gives {share} {story.items} to each of {guests} friends.",
        (f"{guests} * {share}", guests * share),
        (f"{story.has} - {guests * share}", story.has - guests * share),
    )
    return True


_EVENTS: dict[int, tuple[Callable[[_Story], bool], ...]] = {
    1: (_find, _give, _double, _split),
    2: (_packs, _guests),
}


def _ask_left(story: _Story) -> str:
    return f"How many {story.items} does {story.name} have now?"


def _ask_money(story: _Story) -> str:
    price = story.rng.randint(2, 9)
    story.tell(
        f"In the end {story.name} sells all {story.their} {story.items} for {price} dollars each.",
        (f"{story.has} * {price}", story.has * price),
    )
    return f"How many dollars does {story.name} get?"


def _ask_together(story: _Story) -> str:
    count, extra = story.has, story.rng.randint(2, story.largest)
    story.tell(
        f"{story.friend} has {extra} more {story.items} than {story.name} has now.",
        (f"{count} + {extra}", count + extra),
        (f"{count} + {count + extra}", 2 * count + extra),
    )
    return f"How many {story.items} do {story.name} and {story.friend} have together?"


_QUESTIONS: dict[int, Callable[[_Story], str]] = {0: _ask_left, 1: _ask_money, 2: _ask_together}


def draw_problem(rng: random.Random, *, min_steps: int, max_steps: int, largest: int, distractors: int) -> Problem:
    """Draw a problem.

    Args:
        min_steps, max_steps: range of the number of calculations.
        largest: maximum of the numbers in the story.
        distractors: number of irrelevant sentences.
    """
    count = rng.randint(min_steps, max_steps)
    story = _Story(rng, largest)
    ending = rng.choice([steps for steps in _QUESTIONS if steps <= count])
    while (remaining := count - ending - len(story.steps)) > 0:
        steps = rng.choice([steps for steps in _EVENTS if steps <= remaining])
        rng.choice(_EVENTS[steps])(story)
    question = _QUESTIONS[ending](story)
    for aside in rng.sample(_ASIDES, distractors):
        sentence = aside.format(name=story.name, n=rng.randint(5, max(6, largest)))
        story.sentences.insert(rng.randint(0, len(story.sentences)), sentence)
    return Problem(" ".join([*story.sentences, question]), tuple(story.steps))
