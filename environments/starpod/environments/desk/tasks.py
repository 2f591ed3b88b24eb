"""Tasks: instructions, checklists, and the expert's calls."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .office import DAYS, Event, Mail, Office, earliest

Call = tuple[str, Mapping[str, str | int]]
"""A tool and its arguments."""


@dataclass
class Changes:
    """The current calendar and files, and the mails sent so far."""

    events: dict[int, Event]
    files: dict[str, str]
    sent: list[Mail]

    def mailed(self, address: str, *words: str) -> bool:
        """Return whether one mail to the address contains all words, in upper or lower case. 9 does not match 19."""
        patterns = [re.compile(rf"(?<!\d){re.escape(word)}(?!\d)", re.IGNORECASE) for word in words]
        texts = [f"{mail.subject}\n{mail.body}" for mail in self.sent if mail.other == address]
        return any(all(pattern.search(text) for pattern in patterns) for text in texts)


class DeskTask(ABC):
    """A task in the office, with its checklist and the expert's calls."""

    @abstractmethod
    def ask(self) -> str:
        """Return the instruction."""

    @abstractmethod
    def criteria(self, changes: Changes) -> dict[str, bool]:
        """Return the checklist."""

    @abstractmethod
    def look(self) -> list[Call]:
        """Return the expert's calls that gather information."""

    @abstractmethod
    def act(self, changes: Changes) -> Call | None:
        """Return the expert's next call that changes something, or None if the task is done."""

    @property
    def recipients(self) -> frozenset[str]:
        """Addresses to which mails may be sent."""
        return frozenset()

    @property
    def files(self) -> frozenset[str]:
        """Files that may be written."""
        return frozenset()

    def is_meant(self, event: Event) -> bool:
        """Return whether this meeting may be added to the calendar."""
        return False

    def may_go(self, number: int) -> bool:
        """Return whether this meeting may be deleted from the calendar."""
        return False


@dataclass(frozen=True)
class ScheduleTask(DeskTask):
    """Add a meeting at the earliest free time, and mail the attendee."""

    name: str
    address: str
    title: str
    day: str
    start: int
    hours: int

    @property
    def event(self) -> Event:
        return Event(self.title, self.day, self.start, self.hours, self.name)

    @property
    def recipients(self) -> frozenset[str]:
        return frozenset({self.address})

    def is_meant(self, event: Event) -> bool:
        return event == self.event

    def ask(self) -> str:
        length = "one hour" if self.hours == 1 else f"{self.hours} hours"
        return (
            f"Put a meeting called {self.title!r} with {self.name} into the calendar: on {self.day}, {length}, as "
            "early as the calendar allows. Then mail the day and the hour of its start to them."
        )

    def criteria(self, changes: Changes) -> dict[str, bool]:
        return {
            "meeting_on_the_day": any(
                event.title == self.title and event.day == self.day for event in changes.events.values()
            ),
            "meeting_as_asked": self.event in changes.events.values(),
            "attendee_told": changes.mailed(self.address, self.day, str(self.start)),
        }

    def look(self) -> list[Call]:
        return [("list_events", {"day": self.day}), ("find_contact", {"name": self.name})]

    def act(self, changes: Changes) -> Call | None:
        if self.event not in changes.events.values():
            numbers = (number for number, event in changes.events.items() if event.title == self.title)
            if (number := next(numbers, None)) is not None:
                return "delete_event", {"id": number}
            return "add_event", {
                "title": self.title,
                "day": self.day,
                "start": self.start,
                "hours": self.hours,
                "attendee": self.name,
            }
        if not self.criteria(changes)["attendee_told"]:
            body = f"We meet on {self.day} at {self.start}."
            return "send_mail", {"to": self.address, "subject": self.title, "body": body}
        return None


@dataclass(frozen=True)
class CancelTask(DeskTask):
    """Delete all meetings of a day, and mail their attendees."""

    day: str
    meetings: tuple[tuple[int, str, str], ...]
    """Number, title and attendee's address of each meeting."""
    names: tuple[str, ...]

    @property
    def recipients(self) -> frozenset[str]:
        return frozenset(address for _, _, address in self.meetings)

    def may_go(self, number: int) -> bool:
        return any(number == meeting for meeting, _, _ in self.meetings)

    def ask(self) -> str:
        return (
            f"Delete all meetings of {self.day} from the calendar, and mail everybody whom one of them was with, "
            "naming its title."
        )

    def criteria(self, changes: Changes) -> dict[str, bool]:
        return {
            "meetings_deleted": all(number not in changes.events for number, _, _ in self.meetings),
            "attendees_told": all(changes.mailed(address, title) for _, title, address in self.meetings),
        }

    def look(self) -> list[Call]:
        return [("list_events", {"day": self.day}), *(("find_contact", {"name": name}) for name in self.names)]

    def act(self, changes: Changes) -> Call | None:
        for number, title, address in self.meetings:
            if number in changes.events:
                return "delete_event", {"id": number}
            if not changes.mailed(address, title):
                return "send_mail", {"to": address, "subject": title, "body": f"{title} on {self.day} is off."}
        return None


@dataclass(frozen=True)
class ReportTask(DeskTask):
    """Mail a fact from the files to somebody."""

    name: str
    address: str
    project: str
    what: str
    value: str

    @property
    def recipients(self) -> frozenset[str]:
        return frozenset({self.address})

    def ask(self) -> str:
        return (
            f"Look up the {self.what} of project {self.project} in the files and mail it, as it is written there, to "
            f"{self.name}."
        )

    def criteria(self, changes: Changes) -> dict[str, bool]:
        return {"fact_mailed": changes.mailed(self.address, self.value)}

    def look(self) -> list[Call]:
        return [
            ("list_files", {}),
            ("read_file", {"name": f"{self.project.lower()}.txt"}),
            ("find_contact", {"name": self.name}),
        ]

    def act(self, changes: Changes) -> Call | None:
        if changes.mailed(self.address, self.value):
            return None
        body = f"The {self.what} is {self.value}."
        return "send_mail", {"to": self.address, "subject": f"Project {self.project}", "body": body}


@dataclass(frozen=True)
class KeepTask(DeskTask):
    """Write the door code from a mail into a file."""

    name: str
    mail: int
    code: str
    file: str

    @property
    def files(self) -> frozenset[str]:
        return frozenset({self.file})

    def ask(self) -> str:
        return f"{self.name} mailed you a door code. Write a file {self.file} that holds the code and nothing else."

    def criteria(self, changes: Changes) -> dict[str, bool]:
        return {
            "file_written": self.file in changes.files,
            "code_kept": changes.files.get(self.file, "").strip() == self.code,
        }

    def look(self) -> list[Call]:
        return [("list_mail", {}), ("read_mail", {"id": self.mail})]

    def act(self, changes: Changes) -> Call | None:
        if changes.files.get(self.file, "").strip() == self.code:
            return None
        return "write_file", {"name": self.file, "text": self.code}


KINDS = ("schedule", "cancel", "report", "keep")


def draw_task(rng: random.Random, kind: str, office: Office) -> DeskTask | None:
    """Draw a task of a kind; None if the calendar has no free time for it."""
    name = rng.choice(sorted(office.contacts))
    match kind:
        case "schedule":
            title = f"{rng.choice(('Talk', 'Check', 'Handover', 'Kickoff'))} {rng.choice(('north', 'south', 'west'))}"
            day, hours = rng.choice(DAYS), rng.choice((1, 2))
            start = earliest(office.events, day, hours)
            return None if start is None else ScheduleTask(name, office.contacts[name], title, day, start, hours)
        case "cancel":
            day = rng.choice(sorted({event.day for event in office.events.values()}, key=DAYS.index))
            meetings = [(number, event) for number, event in office.events.items() if event.day == day]
            return CancelTask(
                day,
                tuple((number, event.title, office.contacts[event.attendee]) for number, event in meetings),
                tuple(sorted({event.attendee for _, event in meetings})),
            )
        case "report":
            project, fact, value = rng.choice(office.facts)
            return ReportTask(name, office.contacts[name], project, fact, value)
    name = rng.choice(sorted(office.codes))
    mail = next(number for number, mail in office.inbox.items() if office.codes[name] in mail.body)
    return KeepTask(name, mail, office.codes[name], f"{name.split()[0].lower()}-door.txt")


def draw_tasks(rng: random.Random, kinds: Sequence[str], office: Office) -> list[DeskTask]:
    """Draw a task of each kind (of KINDS). No task adds a meeting on a day whose meetings another task deletes."""
    while True:
        tasks = [task for kind in kinds if (task := draw_task(rng, kind, office))]
        days = [task.day for task in tasks if isinstance(task, ScheduleTask | CancelTask)]
        if len(tasks) == len(kinds) and len(set(days)) == len(days):
            return tasks
