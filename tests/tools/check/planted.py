"""Environments with one bug each: the vault of `starpod new` with replaced lines, as an author could have written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from starpod.check.runner import check
from starpod.check.suite import REQUIREMENTS, REWARD
from starpod.cli.new import fill
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import start_server

Replacement = tuple[str, str]

START = "        self.dial, self.secret = rng.sample(marks, 2)\n"
MOVE = "        before = self.dial\n"
MOVED = "        return Outcome(effective=self.dial != before)\n"
KEY = '        return f"{self.dial} {self.secret} {self.last}".encode()\n'
SHOWN = '        return f"The dial is at {self.dial}. Click: {side}."\n'
IMPORTS = "import random\n"
CLASS = "    # Facts for agents and for the command line.\n"
EXPERT = '        if self.dial == self.secret:\n            return "open"\n'


def before(line: str, more: str) -> Replacement:
    return line, more + line


def after(line: str, more: str) -> Replacement:
    return line, line + more


def method(text: str) -> Replacement:
    """A further method of the class."""
    return before("    def state_key", f"{text}\n")


SLIPS = (MOVE, f"        if self.dynamics.random() < 0.5:\n            return Outcome(effective=False)\n{MOVE}")
"""With this every second turn of the dial fails."""
COUNTS = [after(START, "        self.turns = [0]\n"), before(MOVE, "        self.turns[0] += 1\n")]
SHOWS_TURNS = (SHOWN, SHOWN.replace('."\n', '. Turns: {self.turns}."\n'))
"""With these it counts turns, and shows how many."""
NUMBERED = [before(CLASS, "    number = 0\n"), before(START, "        Vault.number += 1\n")]

CONTRACT: dict[str, list[Replacement]] = {
    "step returns a number": [(MOVED, "        return 0.0\n")],
    "step raises in the fifth turn": [
        *COUNTS,
        before(MOVE, "        if self.turns[0] == 3:\n            raise KeyError(action)\n"),
    ],
    "a reward that is no number": [(MOVED, '        return Outcome(float("nan"))\n')],
    "parts that are not the reward": [(MOVED, '        return Outcome(0.1, reward_parts={"move": 0.2})\n')],
    "offers what has no name": [method("    def valid_actions(self):\n        return ['left', 'right', 'jump']\n")],
    "raises on what it does not know": [
        ('actions=("left", "right", "open")', 'grammar="left, right or open"'),
        before(MOVE, '        {"left": 0, "right": 0}[action]\n'),
        method("    def valid_actions(self):\n        return ['left', 'right', 'open']\n"),
    ],
    "offers what is invalid": [
        before(MOVE, "        if self.dial == 1 and action == 'left':\n            return Outcome(valid=False)\n"),
        (START, "        self.dial, self.secret = 1, rng.choice(marks[1:])\n"),
    ],
    "an expert that advises nonsense": [(EXPERT, '        if self.dial != self.secret:\n            return "turn"\n')],
    "a score above 1": [method("    def score(self):\n        return 10.0 / (1 + abs(self.dial - self.secret))\n")],
    "a score of 1 before the end": [method("    def score(self):\n        return 1.0\n")],
    "a picture that cannot be drawn": [
        ("        limits=", '        render_modes=("text", "html"),\n        limits='),
        ("        side = ", '        if mode == "html":\n            raise NotImplementedError(mode)\n        side = '),
    ],
    "a picture that is none": [(SHOWN, "        return None\n")],
    "drawing takes luck": [SLIPS, ("        side = ", "        self.dynamics.random()\n        side = ")],
    "drawing counts as a move": [("        side = ", "        self.dial = self.dial % 10 + 1\n        side = ")],
    "a key of 100 bytes": [(KEY, KEY.replace(".encode()", ".encode().ljust(100)"))],
    "an empty key": [(KEY, '        return b""\n')],
    "one key for all states": [(KEY, '        return b"vault"\n')],
    "a key of the moment": [after(IMPORTS, "import time\n"), (KEY, "        return str(time.time_ns()).encode()\n")],
}

DETERMINISM: dict[str, list[Replacement]] = {
    "a start of the process's luck": [(START, START.replace("rng.", "random."))],
    "a start of the clock": [
        after(IMPORTS, "import time\n"),
        (START, START.replace("rng.", "random.Random(time.time()).")),
    ],
    "luck of the operating system": [
        after(IMPORTS, "import os\n"),
        before(MOVE, "        if os.urandom(1)[0] < 128:\n            return Outcome(effective=False)\n"),
    ],
    "luck of the process": [(SLIPS[0], SLIPS[1].replace("self.dynamics.", "random."))],
    "luck of the process from the fourth turn": [
        *COUNTS,
        before(MOVE, "        if self.turns[0] > 3 and random.random() < 0.9:\n            return Outcome()\n"),
    ],
    "the hash of a text": [(START, f'{START}        self.secret = hash(f"{{self.seed}}") % 10 + 1\n')],
    "the order of a set": [
        (START, f"{START}        self.secret = int(list({{str(mark) for mark in marks}})[self.dial - 1])\n")
    ],
    "an address": [(SHOWN, SHOWN.replace("{side}", "{side} ({id(self) >> 4})"))],
    "a count of all episodes": [*NUMBERED, (SHOWN, SHOWN.replace("The", "Episode {Vault.number}. The"))],
    "a list that all sessions share": [
        before(CLASS, "    opened = []\n"),
        before(MOVE, "        self.opened.append(action)\n"),
        (SHOWN, SHOWN.replace("{side}", "{side} of {len(self.opened)}")),
    ],
    "a memory of other starts": [
        before(CLASS, "    seen = {}\n"),
        after(START, "        self.secret = self.seen.setdefault(self.dial, self.secret)\n"),
    ],
    "a start that luck decides": [(START, START.replace("rng.", "self.dynamics."))],
}

COPIES: dict[str, list[Replacement]] = {
    "a snapshot without its luck": [
        SLIPS,
        method("    def get_state(self):\n        return {**super().get_state(), '_dynamics': None}\n"),
    ],
    "a snapshot without its count": [
        *COUNTS,
        SHOWS_TURNS,
        method("    def get_state(self):\n        return {**super().get_state(), 'turns': [0]}\n"),
    ],
    "a state among what is cached": [
        after(START, "        self._cached_moves = 0\n"),
        before(MOVE, "        self._cached_moves = getattr(self, '_cached_moves', 0) + 1\n"),
        (SHOWN, SHOWN.replace("{side}", "{side} of {getattr(self, '_cached_moves', 0)}")),
    ],
    "a state that cannot be written": [after(START, "        self.sound = lambda: 'click'\n")],
    "a copy that shares": [
        *COUNTS,
        SHOWS_TURNS,
        method(
            "    def copy(self):\n        copied = type(self)()\n        copied.__dict__.update(self.__dict__)\n"
            "        return copied\n"
        ),
    ],
    "a copy that is the original": [method("    def copy(self):\n        return self\n")],
    "a copy that starts again": [
        method(
            "    def copy(self):\n        copied = super().copy()\n        copied.reset(random.Random(self.seed))\n"
            "        return copied\n"
        )
    ],
    "saving that moves": [
        method("    def get_state(self):\n        self.dial = self.dial % 10 + 1\n        return super().get_state()\n")
    ],
    "restoring that moves": [
        method("    def set_state(self, state):\n        super().set_state({**state, 'dial': 1})\n")
    ],
    "a copy with luck of its own": [
        SLIPS,
        method(
            "    def copy(self):\n        copied = super().copy()\n        copied._dynamics = random.Random(1)\n"
            "        return copied\n"
        ),
    ],
}


SOLVED = "return Outcome(reward=float(solved), terminated=True, success=solved)"
TEXT = ('actions=("left", "right", "open")', 'grammar="left, right or open"')
"""With this a policy may write what it likes."""
SHOWN = 'return f"The dial is at'


def _if(word: str, outcome: str) -> str:
    """A turn in which a word is paid."""
    return f'        if "{word}" in action:\n            return {outcome}\n{MOVE}'


REWARDS: dict[str, tuple[str, list[Replacement]]] = {
    "no limit": ("R-01", [("limits=Limits(max_turns=12)", "limits=Limits()")]),
    "an expert that never opens": ("R-02", [('return "open"', 'return "left"')]),
    "any end is a success": ("R-02", [("solved = self.dial == self.secret", "solved = True")]),
    "pays for an end": ("R-07", [(SOLVED, SOLVED.replace("float(solved)", "1.0"))]),
    "pays for failing": ("R-07", [(SOLVED, SOLVED.replace("float(solved)", "float(not solved)"))]),
    "always the same start": ("R-04", [("self.secret = rng.sample(marks, 2)", "self.secret = 4, 4")]),
    "pays for each move": ("R-04", [("effective=self.dial != before", "reward=1.0")]),
    "pays a little for each move": ("R-08", [("effective=self.dial != before", "reward=0.05")]),
    "believes what is written": ("R-05", [TEXT, (MOVE, _if("success", "Outcome(1.0, True, success=True)"))]),
    "pays a little for what is written": ("R-05", [TEXT, (MOVE, _if("reward", "Outcome(0.01)"))]),
    "meets a criterion from the start": (
        "R-09",
        [
            TEXT,
            (MOVED, '        return Outcome(effective=self.dial != before, criteria={"calm": action != "shout"})\n'),
        ],
    ),
    "shows the seed": ("R-06", [(SHOWN, SHOWN.replace("The", "Episode {self.seed}. The"))]),
    "shows the seed in hexadecimal": ("R-06", [(SHOWN, SHOWN.replace("The", "Episode {self.seed:X}. The"))]),
    "shows the end of the seed": ("R-06", [(SHOWN, SHOWN.replace("The", "Episode {self.seed % 1000}. The"))]),
    "shows the seed of its luck": ("R-06", [(SHOWN, SHOWN.replace("The", "Luck {self.dynamics_seed}. The"))]),
}

PLANTED = {
    "contract": CONTRACT,
    "determinism": DETERMINISM,
    "copies": COPIES,
    "rewards": {name: changes for name, (_, changes) in REWARDS.items()},
}
"""By kind."""
RIGHT = {"right": [], "luck": [SLIPS], "counts": [*COUNTS, SHOWS_TURNS]}
"""Without a bug."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Found:
    """Results of the check: on planted bugs, and on environments without a bug.

    missed: the bugs of each kind that it did not find; planted: how many there are. wrong: what it found in an
    environment without a bug, by id; good: how many such there are.
    """

    planted: dict[str, int]
    missed: dict[str, list[str]]
    good: int
    wrong: dict[str, list[str]]


def look_for_all(folder: Path, good: Sequence[str] = ()) -> Found:
    """Checks environments with all bugs, and without. good: what else has none, in the words of `starpod serve`."""
    changes = {f"{kind}-{n}-v1": each for kind, bugs in PLANTED.items() for n, each in enumerate(bugs.values())}
    changes |= {f"{name}-v1": each for name, each in RIGHT.items()}
    words = [*good, *write_modules(folder, {id_: vault(id_, each) for id_, each in changes.items()})]
    with start_server(*words) as server, start_server(*words) as also:
        unmet = asyncio.run(_unmet(server.address, also.address))
    missed = {
        kind: [bug for number, bug in enumerate(bugs) if not unmet.pop(f"{kind}-{number}-v1")]
        for kind, bugs in PLANTED.items()
    }
    wrong = {id_: found for id_, found in unmet.items() if found}
    return Found({kind: len(each) for kind, each in PLANTED.items()}, missed, len(unmet), wrong)


async def _unmet(address: str, also: str) -> dict[str, list[str]]:
    """Return the requirements that each environment of a server violates, including SHOULDs."""
    with grpc.insecure_channel(address) as channel:
        specs = EnvironmentServiceStub(channel).Describe(pb.DescribeRequest()).environments
    room = asyncio.Semaphore(AT_ONCE)

    async def one(id_: str) -> list[str]:
        async with room:
            report = await check(
                address, [*REQUIREMENTS, *REWARD], environments=[id_], also=also, seconds=180.0, call_seconds=60.0
            )
        return [f"{r.requirement.id}: {r.message}" for r in report.results if r.status in ("failed", "error")]

    return dict(zip([s.id for s in specs], await asyncio.gather(*(one(s.id) for s in specs)), strict=True))


def write_modules(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Writes environments, by id, into files of their own; the options of a server for them."""
    words = []
    for id_, text in texts.items():
        file = folder / f"{id_.replace('-', '_')}.py"
        file.write_text(text)
        words += [str(file)]
    return words


def vault(id_: str, changes: Sequence[Replacement] = (), *, expert: bool = True) -> str:
    """The vault of `starpod new` under an id, with changes. Each must fit one place."""
    values = {"file": "vault", "id": id_, "title": "Vault", "name": "Vault"}
    text = fill("environment", values, options=False, expert=expert)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
