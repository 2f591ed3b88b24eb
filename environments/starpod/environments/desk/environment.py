"""A desk with calendar, files and mail. Actions are tool calls, and a checklist shows the progress."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from starpod.env_server import (
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Limits,
    Outcome,
    ToolCall,
    digest,
)

from .office import DAYS, Event, Mail, Office, draw_office, is_free
from .picture import draw
from .tasks import KINDS, Changes, DeskTask, draw_tasks
from .tools import TOOLS, BadCall, read_call, write_call

MOST_THINGS = 50
"""Maximum number of meetings, of files and of sent mails."""

_INSTRUCTIONS = (
    "You keep the calendar, the files and the mail of an office. Do what you are asked, change nothing else, and then "
    'call finish. Each action calls one tool, as a tool call or as a text such as list_events {"day": "Monday"}. '
    "Meetings lie between 9 and 17 o'clock and last whole hours."
)


class DeskOptions(EnvironmentOptions):
    """Options for the tasks and the reward."""

    tasks: tuple[str, ...] | None = Field(
        default=None, description=f"Kinds of tasks, in order, each at most once: {', '.join(KINDS)}."
    )
    count: int = Field(default=1, ge=1, le=len(KINDS), description="Number of tasks to draw if `tasks` is not given.")
    reward: Literal["all", "share"] = Field(
        default="all",
        description="Reward of finish. all: 1 if the whole checklist is met, else 0; share: the share that is met.",
    )
    expert_calls: Literal["tool_call", "text"] = Field(
        default="tool_call",
        description="Form of the expert's actions: tool calls, or texts for agents that write text.",
    )

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if tasks is not None and (not tasks or len(set(tasks)) < len(tasks) or not set(tasks) <= set(KINDS)):
            raise ValueError(f"name one or more of {', '.join(KINDS)}, each at most once")
        return tasks


class Desk(Environment):
    """Office work. The seed determines the office and the tasks; the transitions are deterministic."""

    spec = EnvironmentSpec(
        id="desk-v1",
        version="1.1.0",
        title="Desk: calendar, files and mail by tool calls",
        instructions=_INSTRUCTIONS,
        tools=TOOLS,
        grammar='a tool call, or its text: name {"argument": "value"}',
        render_modes=("text", "png"),
        limits=Limits(max_turns=30, max_actions_per_turn=4, max_actions=60),
    )
    Options = DeskOptions
    options: DeskOptions

    drawn: int
    """Seed of the office and the tasks."""
    events: dict[int, tuple[Any, ...]]
    files: dict[str, str]
    sent: list[tuple[Any, ...]]
    looked: list[str]
    """Texts of the latest calls that list, read or find something. The expert does not repeat them."""
    last: str
    """The result of the latest call."""
    done: bool
    _cached_start: tuple[Office, list[DeskTask]] | None = None

    def reset(self, rng: random.Random) -> None:
        self.drawn = rng.getrandbits(63)
        self._cached_start = None
        office, tasks = self.start
        self.events = {number: tuple(event) for number, event in office.events.items()}
        self.files = dict(office.files)
        self.sent = []
        self.looked = []
        self.last = "\n".join(task.ask() for task in tasks)
        self.done = False

    @property
    def start(self) -> tuple[Office, list[DeskTask]]:
        """The initial office and the tasks. They are not part of the state, so a restore or fork draws them again."""
        if self._cached_start is None:
            rng = random.Random(self.drawn)
            office = draw_office(rng)
            kinds = self.options.tasks or rng.sample(KINDS, self.options.count)
            self._cached_start = office, draw_tasks(rng, kinds, office)
        return self._cached_start

    @property
    def current_changes(self) -> Changes:
        events = {number: Event(*event) for number, event in self.events.items()}
        return Changes(events, self.files, [Mail(*mail) for mail in self.sent])

    def step(self, action: Any) -> Outcome:
        try:
            name, arguments = read_call(action)
            before = (len(self.events), len(self.sent), dict(self.files))
            self.last = self._call(name, arguments)
        except BadCall as problem:
            self.last = f"Error: {problem}"
            return Outcome(valid=False, effective=False, criteria=self.criteria())
        criteria = self.criteria()
        if name != "finish":
            is_look = name.startswith(("list", "read", "find"))
            if is_look and (call := write_call(name, arguments)) not in self.looked:
                self.looked = [*self.looked, call][-MOST_THINGS:]
            has_changed = before != (len(self.events), len(self.sent), self.files)
            return Outcome(effective=is_look or has_changed, criteria=criteria)
        self.done = True
        share = sum(criteria.values()) / len(criteria)
        reward = share if self.options.reward == "share" else float(share == 1)
        return Outcome(reward, terminated=True, success=share == 1, criteria=criteria)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Execute a tool and return its result. Raises BadCall."""
        office, _ = self.start
        match name:
            case "list_events":
                events = sorted(
                    ((event, number) for number, event in self.events.items() if event[1] == arguments["day"]),
                    key=lambda entry: entry[0][2],
                )
                lines = [f"{number}: {e[2]} to {e[2] + e[3]}, {e[0]}, with {e[4]}" for e, number in events]
                return "\n".join(lines) or f"No meetings on {arguments['day']}."
            case "add_event":
                return self._add(Event(**arguments))
            case "delete_event":
                if arguments["id"] not in self.events:
                    raise BadCall(f"there is no meeting {arguments['id']}")
                return f"Deleted: {self.events.pop(arguments['id'])[0]}."
            case "list_files":
                return "\n".join(self.files)
            case "read_file":
                if arguments["name"] not in self.files:
                    raise BadCall(f"there is no file {arguments['name'][:40]!r}")
                return self.files[arguments["name"]]
            case "write_file":
                if not arguments["name"] or (len(self.files) >= MOST_THINGS and arguments["name"] not in self.files):
                    raise BadCall(
                        "give the file a name" if not arguments["name"] else "there is no room for more files"
                    )
                self.files[arguments["name"]] = arguments["text"]
                return f"Written: {arguments['name']}."
            case "list_mail":
                return "\n".join(
                    f"{number}: from {mail.other}, {mail.subject}" for number, mail in office.inbox.items()
                )
            case "read_mail":
                if (mail := office.inbox.get(arguments["id"])) is None:
                    raise BadCall(f"there is no mail {arguments['id']}")
                return f"From {mail.other}\n{mail.subject}\n\n{mail.body}"
            case "send_mail":
                return self._send(Mail(arguments["to"], arguments["subject"], arguments["body"]), office)
            case "find_contact":
                query = arguments["name"].strip().lower()
                hits = [f"{name}: {address}" for name, address in office.contacts.items() if query in name.lower()]
                if not query or not hits:
                    raise BadCall(f"nobody is called {arguments['name'][:40]!r}")
                return "\n".join(hits)
        return "Done."

    def _add(self, event: Event) -> str:
        events = self.current_changes.events
        if not is_free(events, event.day, event.start, event.hours):
            raise BadCall(f"{event.day} from {event.start} to {event.start + event.hours} is not free")
        number = max(*events, *self.start[0].events, 0) + 1  # never reuse the number of an initial meeting
        self.events[number] = tuple(event)
        return f"Added as {number}."

    def _send(self, mail: Mail, office: Office) -> str:
        if mail.other not in office.contacts.values():
            raise BadCall(f"{mail.other[:60]!r} is no address of a contact")
        if len(self.sent) >= MOST_THINGS:
            raise BadCall("no more mails can be sent today")
        self.sent.append(tuple(mail))
        return f"Sent to {mail.other}."

    def criteria(self) -> dict[str, bool]:
        """Return the checklist of all tasks, with an item that says whether nothing else was changed.

        That item is met together with the first item of a task, because doing nothing changes nothing.
        """
        office, tasks = self.start
        now = self.current_changes
        items = {name: is_met for task in tasks for name, is_met in task.criteria(now).items()}
        return items | {"nothing_else_changed": any(items.values()) and _is_tidy(office, tasks, now)}

    def observe(self) -> str:
        return self.last

    def state_key(self) -> bytes:
        state = (self.drawn, sorted(self.events.items()), sorted(self.files.items()), self.sent, self.done)
        return digest(repr(state))

    def expert_action(self) -> ToolCall | str | None:
        if self.done:
            return None
        name, arguments = self._next_call()
        return write_call(name, arguments) if self.options.expert_calls == "text" else ToolCall(name, arguments)

    def _next_call(self) -> tuple[str, Mapping[str, Any]]:
        _, tasks = self.start
        now = self.current_changes
        for task in tasks:
            act = task.act(now)
            if act:
                calls = (call for call in task.look() if write_call(*call) not in self.looked)
                return next(calls, act)
        return "finish", {}

    def score(self) -> float:
        """Return 0.95 * the share of the tasks' checklist that is met; after finish, 1 or 0."""
        criteria = self.criteria()
        if self.done:
            return float(all(criteria.values()))
        is_tidy = criteria.pop("nothing_else_changed")
        return 0.95 * is_tidy * sum(criteria.values()) / len(criteria)

    def render(self, mode: str = "text") -> str | bytes:
        office, tasks = self.start
        now = self.current_changes
        if mode == "png":
            return draw(now, frozenset(set(self.files) - set(office.files)), frozenset(office.events), self.criteria())
        events = sorted(now.events.values(), key=lambda event: (DAYS.index(event.day), event.start))
        return "\n".join(
            [
                *(task.ask() for task in tasks),
                *(f"{event.day} {event.start} to {event.start + event.hours}: {event.title}" for event in events),
                f"Files: {', '.join(self.files)}",
                *(f"Sent to {mail.other}: {mail.subject}: {mail.body}" for mail in now.sent),
                *(f"[{'x' if is_met else ' '}] {name}" for name, is_met in self.criteria().items()),
            ]
        )


def _is_tidy(office: Office, tasks: list[DeskTask], changes: Changes) -> bool:
    """Return whether all changes are required by a task."""
    for number, event in office.events.items():
        if changes.events.get(number) != event and not any(task.may_go(number) for task in tasks):
            return False
    new_events = [event for number, event in changes.events.items() if office.events.get(number) != event]
    written = {name for name in {*office.files, *changes.files} if office.files.get(name) != changes.files.get(name)}
    may_write = frozenset[str]().union(*(task.files for task in tasks))
    may_hear = frozenset[str]().union(*(task.recipients for task in tasks))
    return (
        all(any(task.is_meant(event) for task in tasks) for event in new_events)
        and len(set(new_events)) == len(new_events)
        and written <= may_write
        and {mail.other for mail in changes.sent} <= may_hear
    )
