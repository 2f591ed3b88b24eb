"""A robot carries a parcel to the door of a room. docs/tutorial-environment.md explains each part."""

import random
from dataclasses import astuple, dataclass
from typing import Any

from pydantic import Field

from starpod.env_server import INVALID, Canvas, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class CourierOptions(EnvironmentOptions):
    size: int = Field(default=4, ge=2, le=9, description="Rows and columns of the room.")
    slip: float = Field(default=0.0, ge=0, lt=1, description="Probability that the wheels slip and the robot stays.")


@dataclass
class Room:
    robot: tuple[int, int]  # row and column, from 1
    parcel: tuple[int, int]
    door: tuple[int, int]
    carrying: bool = False


class Courier(Environment):
    spec = EnvironmentSpec(
        id="courier-v1",
        version="1.0.0",
        title="Courier",
        instructions="You steer a robot. Take the parcel, carry it to the door and drop it there. Elsewhere it breaks.",
        actions=(*MOVES, "take", "drop"),
        render_modes=("text", "png"),
        limits=Limits(max_turns=20),
        fully_observed=True,
    )
    Options = CourierOptions
    options: CourierOptions

    def reset(self, rng: random.Random) -> None:
        tiles = [(row, column) for row in self.lines() for column in self.lines()]
        robot, parcel, door = rng.sample(tiles, 3)
        self.room = Room(robot, parcel, door)

    def lines(self) -> range:
        return range(1, self.options.size + 1)

    def step(self, action: str) -> Outcome:
        room = self.room
        if action == "take":
            if room.carrying or room.robot != room.parcel:
                return INVALID
            room.carrying = True
            return Outcome(reward=0.3, reward_parts={"parcel": 0.3})
        if action == "drop":
            if not room.carrying:
                return INVALID
            solved = room.robot == room.door  # elsewhere the parcel breaks
            return Outcome(reward=0.7 * solved, reward_parts={"door": 0.7 * solved}, terminated=True, success=solved)
        row, column = (here + step for here, step in zip(room.robot, MOVES[action], strict=True))
        if row not in self.lines() or column not in self.lines():
            return Outcome(reward=-0.05, reward_parts={"wall": -0.05}, effective=False)
        if self.dynamics.random() < self.options.slip:
            return Outcome(effective=False)
        room.robot = (row, column)
        return Outcome()

    def valid_actions(self) -> list[str]:
        room = self.room
        hands = ["drop"] if room.carrying else ["take"] if room.robot == room.parcel else []
        return [*MOVES, *hands]

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return self.picture()
        room, size = self.room, self.options.size
        parcel = "You have the parcel." if room.carrying else f"The parcel is {self.way(room.parcel)}."
        row, column = room.robot
        return f"{parcel} The door is {self.way(room.door)}. You are in row {row}, column {column} of {size}."

    def way(self, goal: tuple[int, int]) -> str:
        """Return where something is from the robot, such as "2 up, 1 left"."""
        down, right = (there - here for there, here in zip(goal, self.room.robot, strict=True))
        counts = {"up": -down, "down": down, "left": -right, "right": right}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count > 0) or "here"

    def expert_action(self) -> str:
        room = self.room
        way = self.way(room.door if room.carrying else room.parcel)
        if way == "here":
            return "drop" if room.carrying else "take"
        return way.split()[1].rstrip(",")

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"room": astuple(self.room)}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state | {"room": Room(*state["room"])})

    def picture(self) -> bytes:
        room, size = self.room, self.options.size
        canvas = Canvas(40 * size, 40 * size, "#eceff1")
        parcel = room.robot if room.carrying else room.parcel
        for shape, (row, column), margin, colour in (
            (canvas.box, room.door, 3, "#8d6e63"),
            (canvas.ellipse, room.robot, 5, "#3f51b5"),
            (canvas.box, parcel, 13, "#ffb300"),
        ):
            left, top = 40 * (column - 1), 40 * (row - 1)
            shape(left + margin, top + margin, left + 40 - margin, top + 40 - margin, colour)
        return canvas.png()
