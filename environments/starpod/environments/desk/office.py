"""The office at the start of an episode: contacts, meetings, files and mails."""

from __future__ import annotations

import random
from typing import NamedTuple

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
OPENS, CLOSES = 9, 17
"""Hours between which meetings can take place."""

_NAMES = (
    *("Amara Okoye", "Ben Fischer", "Chen Wei", "Dana Novak", "Elif Kaya", "Farid Haddad", "Greta Lind", "Hugo Marin"),
    *("Isla Burns", "Jonas Weber", "Kavya Rao", "Luca Conti", "Marta Silva", "Nils Berg", "Olga Petrova", "Priya Shah"),
)
_MEETINGS = (
    "Budget review",
    "Design talk",
    "Hiring round",
    "Sprint planning",
    "Supplier call",
    "Training",
    "Lab visit",
)
_PROJECTS = ("Heron", "Maple", "Orbit", "Pebble", "Quartz", "Saffron", "Tundra", "Willow")
_FACTS = (("budget", "{} thousand euros", 20, 900), ("team size", "{} people", 3, 40), ("deadline", "week {}", 2, 52))
_SMALL_TALK = (
    ("Lunch", "The canteen has soup today. Are you in?"),
    ("Parking", "Please leave the space by the gate free."),
    ("Plants", "Whoever waters the plants: thank you."),
)


class Event(NamedTuple):
    """A meeting in the calendar. `start` is an hour of the day."""

    title: str
    day: str
    start: int
    hours: int
    attendee: str


class Mail(NamedTuple):
    """A mail. `other` is the address of the sender or recipient."""

    other: str
    subject: str
    body: str


class Office(NamedTuple):
    """The office at the start of an episode."""

    contacts: dict[str, str]
    """Mail address of each person, by name."""
    events: dict[int, Event]
    files: dict[str, str]
    inbox: dict[int, Mail]
    facts: list[tuple[str, str, str]]
    """Facts in the files: project, name of the fact, value. Each project has one file."""
    codes: dict[str, str]
    """Door code in the mail of each person, by name."""


def draw_office(rng: random.Random) -> Office:
    """Draw an office with six contacts, six meetings, four files and four mails."""
    people = rng.sample(_NAMES, 6)
    contacts = {name: name.lower().replace(" ", ".") + "@office.example" for name in people}
    events: dict[int, Event] = {}
    titles = rng.sample(_MEETINGS, 6)
    while len(events) < 6:
        event = Event(titles[len(events)], rng.choice(DAYS), rng.randint(OPENS, CLOSES - 2), rng.choice((1, 1, 2)), "")
        if is_free(events, event.day, event.start, event.hours):
            events[len(events) + 1] = event._replace(attendee=rng.choice(people))
    files: dict[str, str] = {}
    facts = []
    for project in rng.sample(_PROJECTS, 4):
        values = {fact: form.format(rng.randint(low, high)) for fact, form, low, high in _FACTS}
        name = f"{project.lower()}.txt"
        files[name] = "\n".join([f"Project {project}", *(f"{fact}: {value}" for fact, value in values.items())])
        facts += [(project, fact, value) for fact, value in values.items()]
    inbox: dict[int, Mail] = {}
    codes = {name: f"{rng.randint(1000, 9999)}-{rng.choice('ABCDEFGH')}" for name in rng.sample(people, 2)}
    mails = [Mail(contacts[name], "Door code", f"The new code of my office is {code}.") for name, code in codes.items()]
    mails += [Mail(contacts[rng.choice(people)], *talk) for talk in rng.sample(_SMALL_TALK, 2)]
    rng.shuffle(mails)
    inbox = dict(enumerate(mails, 1))
    return Office(contacts, events, files, inbox, facts, codes)


def is_free(events: dict[int, Event], day: str, start: int, hours: int) -> bool:
    """Return whether `hours` hours from `start` o'clock, on one of DAYS, are opening hours without a meeting."""
    return (
        start >= OPENS
        and start + hours <= CLOSES
        and not any(
            event.day == day and event.start < start + hours and start < event.start + event.hours
            for event in events.values()
        )
    )


def earliest(events: dict[int, Event], day: str, hours: int) -> int | None:
    """Return the first hour of a day from which `hours` hours are free, or None."""
    return next((start for start in range(OPENS, CLOSES) if is_free(events, day, start, hours)), None)
