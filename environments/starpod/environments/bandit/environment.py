"""Two slot machines whose names hint at how they pay: the two-armed bandit of RAGEN (arXiv 2504.20073)."""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from starpod.env_server import UNKNOWN_NAME, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

from .picture import draw, draw_text

# (low arm, high arm): a profession with a steady income against a risky one. Train and test share no names.
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
    """Options for the arms and their payouts."""

    split: Literal["train", "test"] = Field(
        default="train", description="The list of name pairs to draw from: train has 12, test has 8 others."
    )
    pair: tuple[str, str] | None = Field(
        default=None, description='Names of low and high arm instead of a drawn pair: `["Phoenix", "Dragon"]`.'
    )
    swapped: bool = Field(
        default=False, description="Exchange low and high arm, so that the names mislead: RAGEN's Bandit-Rev."
    )
    low_reward: float = Field(
        default=0.1, description="Payout of the low arm, always the same: 0.1 in RAGEN's code, 0.15 in its paper."
    )
    high_reward: float = Field(default=1.0, description="Payout of the high arm when it wins.")
    high_loss: float = Field(default=0.0, description="Payout of the high arm when it does not win.")
    high_probability: float = Field(default=0.25, ge=0, le=1, description="Probability that the high arm wins.")

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
    """An episode of one pull. The seed orders the names. The dynamics seed determines whether the high arm wins."""

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
    """Names of the two arms, in the order in which they are shown."""
    high: str
    """The name of the arm with the higher average."""
    pulled: str | None
    payout: float

    def reset(self, rng: random.Random) -> None:
        pairs = PAIRS[self.options.split]
        low, high = self.options.pair or pairs[int(rng.random() * len(pairs))]
        if self.options.swapped:
            low, high = high, low
        self.arms = (low, high) if rng.random() < 0.5 else (high, low)
        self.high = high
        self.pulled = None
        self.payout = 0.0

    def step(self, action: Any) -> Outcome:
        name = action.strip().casefold() if isinstance(action, str) else None
        arm = next((arm for arm in self.arms if arm.casefold() == name), None)
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
        # Choosing the better arm is a success even when it does not win.
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
        # Not a digest of the observation: with `swapped`, the same observation belongs to another state.
        return digest(repr((self.arms, self.high, self.pulled, self.payout)))

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return draw(self.arms, self.pulled, self.payout)
        return draw_text(self.arms, self.pulled, self.payout)
