"""Two slot machines whose names hint at how they pay: the two-armed bandit of RAGEN (arXiv 2504.20073)."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any, Literal

from PIL import Image, ImageDraw
from pydantic import Field, field_validator, model_validator

from starpod.env_server.drawing import fit_text, png
from starpod.env_server.environment import (
    UNKNOWN_NAME,
    Environment,
    EnvironmentOptions,
    EnvironmentSpec,
    Limits,
    Outcome,
)

# (low arm, high arm): a steady trade against a gamble. Train and test share no name.
PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("Teacher", "Trader"),
        ("Nurse", "StartupFounder"),
        ("Librarian", "Investor"),
        ("Accountant", "StockBroker"),
        ("Engineer", "RealEstateAgent"),
        ("Pharmacist", "Musician"),
        ("Clerk", "Freelancer"),
        ("Technician", "Youtuber"),
        ("Planner", "Artist"),
        ("Postman", "Pilot"),
        ("Banker", "VentureCapitalist"),
        ("Gardener", "Cryptominer"),
    ),
    "test": (
        ("Receptionist", "Explorer"),
        ("Archivist", "Filmmaker"),
        ("Bookkeeper", "Consultant"),
        ("SocialWorker", "Photographer"),
        ("Mechanic", "GameDesigner"),
        ("Secretary", "Entrepreneur"),
        ("Cashier", "DataScientist"),
        ("CivilServant", "StartupAccelerator"),
    ),
}


class BanditOptions(EnvironmentOptions):
    """Which arms there are and what they pay."""

    split: Literal["train", "test"] = Field(
        default="train", description="Which list of name pairs the seed draws from."
    )
    pair: tuple[str, str] | None = Field(
        default=None, description="The names of the low and the high arm, in this order, instead of a drawn pair."
    )
    low_reward: float = Field(
        default=0.1, description="What the low arm always pays: 0.1 in RAGEN's code, 0.15 in its paper."
    )
    high_reward: float = Field(default=1.0, description="What the high arm pays when it wins.")
    high_loss: float = Field(default=0.0, description="What the high arm pays when it does not win.")
    high_probability: float = Field(default=0.25, ge=0, le=1, description="How often the high arm wins.")

    @field_validator("pair")
    @classmethod
    def _names(cls, pair: tuple[str, str] | None) -> tuple[str, str] | None:
        if pair is None:
            return None
        for name in pair:
            if not 0 < len(name) <= 40 or name != name.strip() or not name.isprintable():
                raise ValueError(f"{name!r} cannot name an arm; use 1 to 40 printable characters, no blank at the ends")
        if pair[0].casefold() == pair[1].casefold():
            raise ValueError(f"both arms are called {pair[0]!r}; give them names that differ in more than case")
        return pair

    @model_validator(mode="after")
    def _high_is_higher(self) -> BanditOptions:
        mean = self.high_probability * self.high_reward + (1 - self.high_probability) * self.high_loss
        if mean <= self.low_reward:
            raise ValueError(
                f"the high arm pays {mean:g} on average, the low arm {self.low_reward:g}; raise high_reward, high_loss "
                "or high_probability, or lower low_reward"
            )
        return self


class Bandit(Environment):
    """One pull decides. The seed fixes the names and their order, the dynamics seed the high arm's luck."""

    spec = EnvironmentSpec(
        id="bandit-v1",
        version="1.0.0",
        title="Two-armed bandit with telling names",
        instructions=(
            "Two slot machines stand before you, and you may pull the arm of one of them, once. Each pays in its own "
            "way, and its name is the hint: think of what the name stands for, how much it would earn and how surely. "
            "Choose the arm that you expect to pay more on average, and answer with its name."
        ),
        grammar="the name of one of the two arms, in any case",
        render_modes=("text", "png"),
        limits=Limits(max_turns=1, max_actions_per_turn=1, max_actions=1),
    )
    Options = BanditOptions
    options: BanditOptions

    arms: tuple[str, str]
    """In the order shown."""
    high: str
    """The name of the arm with the higher average."""
    pulled: str | None
    payout: float

    def reset(self, rng: random.Random) -> None:
        pairs = PAIRS[self.options.split]
        low, high = self.options.pair or pairs[int(rng.random() * len(pairs))]
        self.arms = (low, high) if rng.random() < 0.5 else (high, low)
        self.high = high
        self.pulled = None
        self.payout = 0.0

    def step(self, action: Any) -> Outcome:
        asked = action.strip().casefold() if isinstance(action, str) else None
        arm = next((arm for arm in self.arms if arm.casefold() == asked), None)
        if arm is None:
            return UNKNOWN_NAME
        options = self.options
        if arm != self.high:
            self.payout = options.low_reward
        elif self.dynamics.random() < options.high_probability:
            self.payout = options.high_reward
        else:
            self.payout = options.high_loss
        self.pulled = arm
        # Success is the choice: the better arm is the better choice also when it loses.
        return Outcome(reward=self.payout, terminated=True, success=arm == self.high)

    def observe(self) -> str:
        if self.pulled is None:
            return f"Arms: {self.arms[0]}, {self.arms[1]}"
        return f"{self.pulled}: {self.payout} points"

    def valid_actions(self) -> tuple[str, ...]:
        return self.arms if self.pulled is None else ()

    def expert_action(self) -> str | None:
        return self.high if self.pulled is None else None

    def state_key(self) -> bytes:
        # Not of the observation: with `pair` swapped, the same words hide the other machine.
        state = repr((self.arms, self.high, self.pulled, self.payout))
        return hashlib.blake2b(state.encode(), digest_size=16).digest()

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return png(_draw(self.arms, self.pulled, self.payout))
        return _text(self.arms, self.pulled, self.payout)


def _text(arms: tuple[str, str], pulled: str | None, payout: float) -> str:
    width = max(map(len, arms)) + 4
    rows: list[list[str]] = []
    for arm in arms:
        window = "? ? ?" if arm != pulled else f"{payout:g}"
        lever = ("( )", " | ", "-' ") if arm != pulled else ("   ", "   ", "-. ")
        rows.append(
            [
                f"╭{'─' * width}╮   ",
                f"│{arm:^{width}}│{lever[0]}",
                f"├{'─' * width}┤{lever[1]}",
                f"│{window:^{width}}│{lever[2]}",
                f"╰{'─' * width}╯{'( )' if arm == pulled else '   '}",
            ]
        )
    return "\n".join("    ".join(pieces).rstrip() for pieces in zip(*rows, strict=True))


_SCALE = 3  # drawn three times too large and reduced, for smooth edges
_INK, _GOLD, _CREAM = (38, 30, 52), (246, 196, 83), (255, 248, 231)


def _draw(arms: tuple[str, str], pulled: str | None, payout: float) -> Image.Image:
    """A picture of 480 x 300 pixels; nothing in it tells the arms apart before the pull."""
    canvas = Image.new("RGB", (480 * _SCALE, 300 * _SCALE), (52, 41, 79))
    draw = ImageDraw.Draw(canvas)
    slant, bottom = 120 * _SCALE, canvas.height
    for left in range(-160 * _SCALE, canvas.width + slant, 40 * _SCALE):  # a backdrop of stripes
        right = left + 20 * _SCALE
        draw.polygon([(left, 0), (right, 0), (right - slant, bottom), (left - slant, bottom)], fill=(58, 46, 88))
    draw.rectangle((0, 262 * _SCALE, canvas.width, canvas.height), fill=(33, 26, 51))
    for place, arm in enumerate(arms):
        paid = payout if arm == pulled else None
        _machine(draw, (24 + 228 * place) * _SCALE, arm, paid, dim=pulled not in (None, arm))
    return canvas.reduce(_SCALE)


def _machine(draw: ImageDraw.ImageDraw, left: int, name: str, payout: float | None, dim: bool) -> None:
    s = _SCALE
    body, shade = ((122, 108, 140), (96, 84, 112)) if dim else ((214, 64, 84), (164, 40, 64))

    def box(x: int, y: int, right: int, bottom: int, radius: int, fill: tuple[int, int, int]) -> None:
        draw.rounded_rectangle((left + x * s, y * s, left + right * s, bottom * s), radius * s, fill)

    # The lever: up while unused, down after the pull.
    top = 182 if payout is not None else 62
    box(168, 128, 186, 150, 4, (150, 150, 168))
    draw.line((left + 182 * s, 139 * s, left + 190 * s, top * s), fill=(196, 196, 212), width=6 * s)
    draw.ellipse((left + 178 * s, (top - 12) * s, left + 202 * s, (top + 12) * s), fill=(240, 92, 92))
    draw.ellipse((left + 183 * s, (top - 8) * s, left + 190 * s, (top - 1) * s), fill=(255, 190, 190))

    box(0, 250, 174, 268, 6, shade)
    box(8, 34, 166, 256, 18, shade)
    box(8, 34, 166, 248, 18, body)
    box(18, 44, 156, 82, 10, _CREAM)
    fit_text(draw, (left + 87 * s, 63 * s), name, 130 * s, 22 * s, _INK)

    # The window: three reels, or what was paid.
    box(18, 94, 156, 170, 10, _INK)
    if payout is None:
        question = (170, 160, 180) if dim else body
        for x in (24, 67, 110):
            box(x, 100, x + 40, 164, 6, _CREAM)
            fit_text(draw, (left + (x + 20) * s, 132 * s), "?", 40 * s, 40 * s, question)
    else:
        box(24, 100, 150, 164, 6, _GOLD if payout > 0 else _CREAM)
        fit_text(draw, (left + 87 * s, 132 * s), f"{payout:g}", 110 * s, 46 * s, _INK)

    # The tray, with coins in proportion.
    box(32, 190, 142, 238, 10, _INK)
    coins = 0 if payout is None or payout <= 0 else max(1, min(5, math.ceil(5 * payout)))
    for coin in range(coins):
        x, y = left + (44 + 18 * coin) * s, (208 - 3 * (coin % 2)) * s
        draw.ellipse((x, y, x + 22 * s, y + 22 * s), fill=(196, 140, 40))
        draw.ellipse((x + 2 * s, y + s, x + 20 * s, y + 19 * s), fill=_GOLD)
