"""A house in text, similar to ALFWorld: find things, clean, heat or cool them, and put them where they belong."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any, Literal

from pydantic import Field, field_validator

from starpod.env_server import INVALID, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

from .expert import next_action
from .picture import draw
from .rooms import TASKS, HouseTask, draw_house, possible_tasks
from .state import Nothing, State

MAX_LENGTH = 100
"""Maximum number of characters of an action."""


class HouseOptions(EnvironmentOptions):
    """Options for the tasks and the size of the house."""

    tasks: tuple[str, ...] = Field(default=TASKS, description=f"Kinds of tasks: {', '.join(TASKS)}.")
    split: Literal["all", "train", "test"] = Field(
        default="all", description="train: three in four tasks of each kind; test: the others."
    )
    furniture: int = Field(
        default=8, ge=0, le=40, description="Number of pieces of furniture besides those of every house."
    )
    things: int = Field(default=10, ge=0, le=60, description="Number of things besides those of the task.")
    max_steps: int = Field(default=50, ge=1, le=10_000, description="Actions after which the episode is truncated.")

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks or not set(tasks) <= set(TASKS):
            raise ValueError(f"name one or more of {', '.join(TASKS)}")
        return tasks


class House(Environment):
    """A house. The seed determines the house and the task; the transitions are deterministic."""

    spec = EnvironmentSpec(
        id="house-v1",
        version="1.0.1",
        title="House: find, clean, heat, cool and place things",
        instructions=(
            "You are in a house. Do the task that you are told. Actions are: go to PLACE, open PLACE, close PLACE, "
            "take THING from PLACE, put THING in PLACE, clean THING with sinkbasin 1, heat THING with microwave 1, "
            "cool THING with fridge 1, use desklamp 1, look, inventory. Name places and things with their numbers, as "
            "in take apple 1 from fridge 1. You see what is in or on a place when you stand there and it is open, "
            "and you can carry one thing. What cannot be done changes nothing."
        ),
        grammar="go to PLACE | open PLACE | close PLACE | take THING from PLACE | put THING in PLACE | clean, heat or "
        "cool THING with PLACE | use desklamp 1 | look | inventory",
        render_modes=("text", "png"),
        limits=Limits(max_turns=50, max_actions_per_turn=1, max_actions=50),
    )
    Options = HouseOptions
    options: HouseOptions

    state: State
    told: str
    """The text after the latest action."""
    steps: int

    def reset(self, rng: random.Random) -> None:
        options = self.options
        tasks = _tasks(options.tasks, options.split)
        house = draw_house(rng, tasks[rng.choice(sorted(tasks))], options.furniture, options.things)
        self.state = State(house.task, house.places, house.things)
        self.told = f"You are in the middle of a house. {self.state.view()}\nYour task: {house.task.ask()}."
        self.steps = 0

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"state": dataclasses.asdict(self.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        new_state = State(**state["state"])
        new_state.task = HouseTask(*new_state.task)
        super().set_state({**state, "state": new_state})

    def step(self, action: Any) -> Outcome:
        self.steps += 1
        is_late = self.steps >= self.options.max_steps
        state = self.state
        try:
            if not isinstance(action, str) or len(action) > MAX_LENGTH:
                raise Nothing
            self.told = state.act(" ".join(action.lower().split()))
        except Nothing:
            self.told = "Nothing happens."
            return INVALID._replace(truncated=is_late, criteria=state.stages())
        is_look = self.told.startswith("You hold") or action.strip().lower() in ("look", "inventory")
        stages = state.stages()
        is_done = all(stages.values())
        return Outcome(
            float(is_done),
            terminated=is_done,
            truncated=is_late and not is_done,
            success=is_done or None,
            effective=not is_look,
            criteria=stages,
        )

    def observe(self) -> str:
        return self.told

    def valid_actions(self) -> list[str]:
        return self.state.choices()

    def state_key(self) -> bytes:
        state = self.state
        parts = (state.task, state.places, state.things, state.at, state.held, state.lit, sorted(state.opened))
        return digest(repr((*parts, [sorted(things) for things in state.changed.values()])))

    def expert_action(self) -> str | None:
        return next_action(self.state) if self.steps < self.options.max_steps else None

    def score(self) -> float:
        """Return the share of the task's stages that are reached."""
        stages = self.state.stages()
        return sum(stages.values()) / len(stages)

    def render(self, mode: str = "text") -> str | bytes:
        state = self.state
        if mode == "png":
            return draw(state)
        lines = [f"Task: {state.task.ask()}"]
        for place in state.places:
            is_known = place in state.seen and state.is_open(place)
            lines.append(
                f"{'>' if place == state.at else ' '} {place}: {', '.join(state.inside(place)) if is_known else '?'}"
            )
        return "\n".join([*lines, f"In the hand: {state.held or 'nothing'}"])


@functools.lru_cache(maxsize=64)
def _tasks(kinds: tuple[str, ...], split: str) -> dict[str, list[HouseTask]]:
    return {
        kind: [
            task
            for number, task in enumerate(possible_tasks(kind))
            if split == "all" or (number % 4 == 3) == (split == "test")
        ]
        for kind in kinds
    }
